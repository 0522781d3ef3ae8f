"""8-bit and paged optimizers: the formula against the states that bitsandbytes makes, tensor by tensor."""

from __future__ import annotations

import pytest
import torch

from calc.training import TrainingPlan
from calc.training.states.sharding import StateKey, group_bytes
from calc.training.states.tensors import Tensor, Tensors

pytestmark = pytest.mark.torch


def kept(kind: str, elements: int) -> dict[str, torch.Tensor]:
    """What bitsandbytes keeps of a parameter of so many elements, before any step."""
    optim = pytest.importorskip("bitsandbytes.optim")
    parameter = torch.nn.Parameter(torch.zeros(elements, dtype=torch.bfloat16))
    optimizer = getattr(optim, kind)([parameter])
    optimizer.init_state(optimizer.param_groups[0], parameter, 0, 0)
    state = optimizer.state[parameter]
    return {
        name: value for name, value in state.items() if isinstance(value, torch.Tensor) and not name.startswith("qmap")
    }


def predicted(optimizer: str, elements: int, recipe: str) -> int:
    tensor = Tensor(("weight",), 1, elements, 1, "<N>", "1", (("N", elements),), "weight")
    plan = TrainingPlan(recipe=recipe, optimizer=optimizer, implementation="fused")  # no rounding
    return group_bytes(Tensors((), (tensor,)), StateKey.of(plan)).optimizer


@pytest.mark.parametrize("elements", [1, 4095, 4096, 4097, 256 * 300, 100_000])
def test_8_bit_adamw_keeps_a_byte_and_a_share_of_an_fp32_absmax_and_small_tensors_in_fp32(elements):
    state = kept("AdamW8bit", elements)
    assert predicted("adamw-8bit", elements, "pure-bf16") == sum(value.nbytes for value in state.values())
    small = elements < 4096
    assert {name: value.dtype for name, value in state.items() if name.startswith("state")} == {
        "state1": torch.float32 if small else torch.uint8,
        "state2": torch.float32 if small else torch.uint8,
    }


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("elements", [64, 5000])
def test_paged_adamw_keeps_two_fp32_moments_of_16_bit_weights_too(elements):
    state = kept("PagedAdamW", elements)
    assert (
        predicted("paged-adamw", elements, "pure-bf16") == sum(value.nbytes for value in state.values()) == 8 * elements
    )
