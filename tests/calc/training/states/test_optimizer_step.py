"""What Muon's step makes, against torch's own Muon; it has no foreach form, and what is no hidden matrix has AdamW's."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from calc.training import TrainingPlan, train
from calc.training.states.optimizer_step import group_step
from calc.training.states.sharding import StateKey
from calc.training.states.tensors import Tensor, Tensors
from tests.calc.training.models import model


def torch_step(rows: int, columns: int, dtype: str) -> int:
    """The most bytes that one step of torch.optim.Muon holds besides the parameter, its gradient and its momentum."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Live(TorchDispatchMode):
        now = most = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.numel() > 1:
                storage = made.untyped_storage()
                if storage._cdata not in known:
                    known[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self.free, storage._cdata)
            return made

        def free(self, key: int) -> None:
            self.now -= known.pop(key)

    weight = torch.nn.Parameter(torch.ones(rows, columns, dtype=getattr(torch, dtype)))
    optimizer = torch.optim.Muon([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    lasting = (weight, weight.grad, optimizer.state[weight]["momentum_buffer"])
    known = {tensor.untyped_storage()._cdata: 0 for tensor in lasting}
    live = Live()
    with live:
        optimizer.step()
    return live.most


@pytest.mark.torch
@pytest.mark.parametrize("shape", [(256, 256), (256, 512), (512, 256)])
@pytest.mark.parametrize(("recipe", "dtype"), [("fp32", "float32"), ("pure-bf16", "bfloat16")])
def test_the_step_of_a_matrix_is_torchs_own_to_the_byte(shape, recipe, dtype):
    rows, columns = shape
    tensor = Tensor(("w",), 1, rows, columns, "<a>", "<b>", (("a", rows), ("b", columns)), "w", matrix=True)
    key = StateKey.of(TrainingPlan(recipe=recipe, optimizer="muon"))
    assert group_step(Tensors((), (tensor,)), key).matrix == torch_step(rows, columns, dtype)


def test_muon_copies_no_hidden_matrices_at_once_but_what_adamw_updates_next_to_them():
    loop, foreach = (
        train(model("llama-2-7b"), TrainingPlan(seq=512, optimizer="muon", optimizer_kernel=kernel)).worst.step_bytes
        for kernel in ("loop", "foreach")
    )
    assert foreach == 2 * (2 * 131_072_000 + 65 * 4096)  # one moment of embedding, head and norms in bf16
    assert loop == 2 * (2 * 131_072_000 + 4096)  # two of the head, as of AdamW's loop, and the norm before it
    assert loop > train(model("llama-2-7b"), TrainingPlan(seq=512, optimizer="muon")).worst.step.matrix
