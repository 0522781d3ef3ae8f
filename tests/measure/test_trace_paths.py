"""Predicted and traced bytes of the peak side by side: every path of either is there, and they agree to the byte."""

import pytest

from calc.breakdown import Breakdown, Component
from calc.catalogue import load_config
from calc.model.config import from_config
from calc.training import TrainingPlan, train
from measure.trace import TraceOptions, trace_step
from measure.trace.paths import laid_side_by_side

pytestmark = pytest.mark.torch

SMALL = {"vocab_size": 1000}
FSDP = {"dp": 8, "zero": 3, "recipe": "fsdp-bf16"}
CASES = [
    ("qwen3-0.6b", 3, {}, {}),  # norms on heads, a tied head
    ("llama-2-7b", 3, SMALL, {"recompute": "full", "optimizer": "sgd"}),  # the peak lies in a layer's backward
    ("llama-2-7b", 3, SMALL, {"method": "lora"}),
    ("llama-2-7b", 3, {}, {"method": "dora"}),
    ("llama-2-7b", 3, {}, {"method": "qlora"}),
    ("llama-3.2-1b", 3, SMALL, {"recipe": "amp", "optimizer": "adafactor"}),
    ("llama-3.2-1b", 2, SMALL, {"optimizer_kernel": "loop"}),
    ("gpt2", 12, {}, {"optimizer": "momentum"}),  # fused projections with biases, dropout
    (
        "deepseek-v3",
        4,
        {**SMALL, "n_routed_experts": 16, "n_group": 2, "topk_group": 1},
        {},
    ),  # two kinds of layers, a router's buffers, the step's temporaries
    ("gpt-oss-20b", 3, {}, {"attention": "eager", "optimizer": "sgd"}),  # biases of experts and routers, sinks
    ("gemma-3-1b-it", 6, {}, {"seq": 1024}),
    ("mixtral-8x7b-v0.1", 3, SMALL, FSDP),
]


def both(name, layers, changes, options):
    config = {**load_config(name), "num_hidden_layers": layers, **changes}
    config.pop("n_layer", None)
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    asked = {"seq": 512, "micro_batch": 2, **options}
    spec = from_config(config, name)
    batch = asked["micro_batch"] * asked.get("dp", 1)
    predicted = train(spec, TrainingPlan(global_batch=batch, **asked))
    return predicted, trace_step(config, TraceOptions(**asked)), spec


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "layers", "changes", "options"), CASES, ids=[f"{c[0]}-{c[3]}" for c in CASES])
def test_every_path_of_the_prediction_is_traced_and_the_other_way_round(name, layers, changes, options):
    predicted, seen, spec = both(name, layers, changes, options)
    pairs = laid_side_by_side(predicted.breakdown, seen.as_dict()["alive"], spec)
    assert [pair for pair in pairs if pair.predicted != pair.observed] == []
    assert (pairs[-1].path, pairs[-1].observed) == ("total", seen.peak_bytes)
    assert sum(pair.observed for pair in pairs[:-1]) == seen.peak_bytes
    assert len(pairs) > 20


def test_what_only_one_side_has_stays_visible():
    predicted, seen, spec = both("qwen3-0.6b", 2, SMALL, {"seq": 64})
    alive = [row for row in seen.as_dict()["alive"] if "q_norm" not in row["made_by"]]
    alive.append({"category": "buffers", "path": "x", "made_by": "something/new", "phase": "setup", "value": 3})
    pairs = {pair.path: pair for pair in laid_side_by_side(predicted.breakdown, alive, spec)}
    assert pairs["parameters/layers/attention/q_norm"].observed is None
    more = Breakdown(
        Component("", children=(*predicted.breakdown.root.children, Component("older_weights", 7))), "bytes"
    )
    pairs = {pair.path: pair for pair in laid_side_by_side(more, alive, spec)}
    assert (pairs["older_weights"].predicted, pairs["older_weights"].observed) == (7, None)
