"""What a compiled layer and loss of torchtitan keep, against the graphs that AOTAutograd's min-cut partitioner cuts."""

from __future__ import annotations

import pytest

from calc.model.config import from_config
from calc.training import TrainingPlan
from calc.training.autograd.blocks import Sizes, storage_bytes
from calc.training.pipeline_stages import stages
from calc.training.states.stage_tensors import model_of
from calc.training.torchtitan.stage import torchtitan_segments
from tests.measure.test_torchtitan import config

pytestmark = pytest.mark.torch

LLAMA = (256, 768, 8, 2, 32, 1, 1000)
QWEN = (256, 640, 8, 4, 32, 1, 1000, True)
BATCH, TOKENS = 2, 128
NOT_COMPARED = ("seed", "offset", "rotary_tables")  # the CPU's attention has no seeds; tables are not the layer's


def kept_by_formula(shape, path, **plan) -> int:
    """Bytes of what the segment keeps for backward, its input included."""
    spec = from_config(config(shape), "decoder")
    fields = {
        "implementation": "torchtitan",
        "recipe": "fsdp-bf16",
        "zero": 3,
        "dp": 8,
        "seq": TOKENS,
        "micro_batch": BATCH,
    }
    made = TrainingPlan(**fields, **plan)
    (stage,) = stages(made, spec)
    segments = torchtitan_segments(made, spec, stage, model_of(made, spec))
    block, _ = next(segment.program for segment in segments if segment.path[0] == path)
    sizes = Sizes(BATCH, TOKENS, 1)
    kept = [block.storages[number] for number in block.kept]
    return sum(storage_bytes(each, sizes) for each in kept if each.name[-1] not in NOT_COMPARED)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_compiled_layer_keeps_what_the_partitioner_keeps(name, recompute):
    from tests.measure.compiled_graphs import kept_by_layer
    from tests.measure.torchtitan_program import Shape

    shape = Shape(*{"llama": LLAMA, "qwen3": QWEN}[name])
    seen = kept_by_layer(shape, BATCH, TOKENS, recompute)
    assert kept_by_formula(shape, "layers", recompute=recompute, compile="model") == seen
    assert seen < kept_by_formula(shape, "layers", recompute=recompute) or recompute == "full"  # than run eagerly


def test_a_compiled_loss_keeps_the_logits_and_two_numbers_a_row():
    from tests.measure.compiled_graphs import kept_by_loss
    from tests.measure.torchtitan_program import Shape

    seen = kept_by_loss(BATCH, TOKENS, 1000)
    assert kept_by_formula(Shape(*LLAMA), "loss", compile="loss") == seen
    assert seen == BATCH * TOKENS * (2 * 1000 + 2 * 4) + 4
