"""QLoRA: the formula, our own NF4 kernel and bitsandbytes' Linear4bit agree on bytes."""

from __future__ import annotations

import sys

import pytest
import torch

from calc.catalogue import load_config
from calc.errors import InputError
from calc.model.config import from_config
from calc.training import TrainingPlan, train
from calc.training.states.base_formats import BASE_FORMATS
from calc.units import ceil_div
from kernels.quantize_nf4 import reference
from measure.trace import TraceOptions, trace_step
from tests.recorded.traces import traced

pytestmark = pytest.mark.torch

CASES = [
    ("llama-3.2-1b", {}),
    ("llama-2-7b", {"recompute": "full"}),
    ("llama-2-7b", {"recipe": "amp"}),
    ("qwen2.5-0.5b", {"lora_targets": ("q_proj", "v_proj")}),  # biases, and layers in NF4 without adapters
    ("gpt2", {"recompute": "full"}),
    ("qwen3-30b-a3b", {"lora_targets": ("q_proj", "v_proj"), "recompute": "full"}),  # experts stay in bf16
]


def stored(elements: int) -> int:
    return sum(rule.bytes * ceil_div(elements, rule.per) for rule in BASE_FORMATS["nf4"].stored)


@pytest.mark.parametrize("shape", [(64, 64), (96, 200), (3, 5), (130, 129), (1024, 4096)])
def test_a_weight_in_nf4_takes_the_bytes_of_our_kernel_and_of_bitsandbytes(shape):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(shape)
    ours = reference(weight, double=True)
    packed, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    theirs = (packed, state.absmax, state.state2.absmax)
    assert (
        stored(weight.numel()) == sum(part.nbytes for part in theirs) == ours.nbytes - 4
    )  # the mean is among the tables
    tables = {"levels": state.code, "absmax_levels": state.state2.code, "absmax_mean": state.offset}
    assert {name: part.nbytes for name, part in tables.items()} == dict(BASE_FORMATS["nf4"].tables)


@pytest.mark.parametrize(("name", "kind"), [("nf4-single", "nf4"), ("fp4", "fp4")])
def test_a_format_with_one_level_of_scales_takes_bitsandbytes_bytes(name, kind):
    functional = pytest.importorskip("bitsandbytes.functional")
    for shape in [(64, 64), (96, 200), (3, 5), (1024, 4096)]:
        packed, state = functional.quantize_4bit(torch.randn(shape), blocksize=64, quant_type=kind)
        kept = BASE_FORMATS[name]
        elements = shape[0] * shape[1]
        assert (
            sum(each.bytes * ceil_div(elements, each.per) for each in kept.stored)
            == packed.nbytes + state.absmax.nbytes
        )
        assert dict(kept.tables) == {"levels": state.code.nbytes}


@pytest.mark.recorded
@pytest.mark.parametrize(("name", "changes"), CASES, ids=[f"{name}-{changes}" for name, changes in CASES])
def test_the_formula_is_the_traced_program(name, changes):
    pytest.importorskip("bitsandbytes")
    options = {"seq": 1024, "micro_batch": 2, "method": "qlora", **changes}
    config = load_config(name)
    seen = traced(name, config, TraceOptions(**options))
    predicted = train(from_config(config, name), TrainingPlan(**options))
    states = ("parameters_bytes", "gradients_bytes", "optimizer_bytes")
    assert [getattr(predicted, state) for state in states] == [getattr(seen, state) for state in states]
    assert predicted.activations_bytes == seen.activations_bytes
    assert (predicted.peak_bytes, predicted.peak_phase) == (seen.peak_bytes, seen.peak_phase)


def test_without_bitsandbytes_a_trace_names_it(monkeypatch):
    for module in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(InputError, match="pip install bitsandbytes"):
        trace_step(load_config("llama-3.2-1b"), TraceOptions(seq=64, method="qlora"))
