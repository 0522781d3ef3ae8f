"""The fused AdamW takes torch.optim.AdamW's step, at least as accurately as PyTorch does in the same dtypes."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernels import adamw as kernel  # noqa: E402
from tests.kernels.precision import assert_as_accurate, normal  # noqa: E402

pytestmark = pytest.mark.torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPTIONS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def state(shape, dtypes, device):
    """param, grad, first, second, in the middle of training."""
    tensors = [normal(*shape, seed=seed, device=device) for seed in range(4)]
    tensors[3] = tensors[3].square() + 0.1
    return [x.to(dtype) for x, dtype in zip(tensors, dtypes, strict=True)]


@pytest.mark.parametrize(
    "dtypes",
    [(FP32,) * 4, (BF16,) * 4, (FP16,) * 4, (BF16, BF16, FP32, FP32), (FP32, BF16, FP32, FP32)],
    ids=["fp32", "bf16", "fp16", "bf16, fp32 moments", "bf16 gradient"],
)
@pytest.mark.parametrize("shape", [(1,), (64,), (3, 37)], ids=str)
def test_a_step_is_as_accurate_as_pytorchs(shape, dtypes, device):
    given = state(shape, dtypes, device)
    ours, theirs, true = [x.clone() for x in given], [x.clone() for x in given], [x.double() for x in given]
    kernel.adamw(*ours, step=3, **OPTIONS)
    for tensors in (theirs, true):
        kernel.reference(*tensors, step=3, **OPTIONS)
    assert torch.equal(ours[1], given[1])
    for found, rival, exact in zip(ours, theirs, true, strict=True):
        assert_as_accurate(found, rival, exact)


@pytest.mark.parametrize("function", ["adamw", "reference"])
def test_three_steps_from_nothing_are_those_of_torch_optim(function, device):
    dtype = torch.float64 if function == "reference" else torch.float32
    start = normal(5, 29, dtype=dtype, device=device)
    param = start.clone()
    first, second = torch.zeros_like(param), torch.zeros_like(param)
    theirs = torch.nn.Parameter(start.clone())
    truth = torch.nn.Parameter(start.double())
    optimizers = [torch.optim.AdamW([leaf], **OPTIONS) for leaf in (theirs, truth)]
    for step in (1, 2, 3):
        grad = normal(5, 29, dtype=dtype, device=device, seed=step)
        getattr(kernel, function)(param, grad, first, second, step=step, **OPTIONS)
        for leaf, optimizer in zip((theirs, truth), optimizers, strict=True):
            leaf.grad = grad.to(leaf.dtype)
            optimizer.step()
    if function == "reference":
        assert torch.allclose(param, theirs, rtol=1e-13, atol=1e-15)
    else:
        assert_as_accurate(param, theirs, truth)


def test_no_elements_are_borne(device):
    empty = torch.zeros(0, 3, device=device)
    kernel.adamw(empty, empty, empty, empty, step=1)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"param": torch.zeros(3).double()}, {}, r"param must be one of .*; it is float64"),
        ({"grad": torch.zeros(4)}, {}, r"grad must have shape \(3,\); its shape is \(4,\)"),
        ({"first": torch.zeros(6)[::2]}, {}, r"first must be contiguous; .* strides \(2,\)"),
        ({"second": torch.zeros(3).long()}, {}, r"second must be one of .*; it is int64"),
        ({}, {"step": 0}, "step must be at least 1; it is 0"),
        ({}, {"betas": (0.9, 1.0)}, r"the second of betas must be at least 0 and below 1; it is 1\.0"),
    ],
)
def test_what_does_not_fit_is_refused(change, options, message, device):
    given = {name: torch.zeros(3, device=device) for name in ("param", "grad", "first", "second")}
    given |= {name: x.to(device) for name, x in change.items()}
    with pytest.raises(ValueError, match=message):
        kernel.adamw(**given, **{"step": 1} | options)


def test_it_moves_28_bytes_an_element_in_fp32():
    x = torch.zeros(10)
    assert kernel.bytes_moved(x, x, x, x) == 280
    assert kernel.bytes_moved(x.half(), x.half(), x, x) == 10 * (2 + 2 * (2 + 4 + 4))
