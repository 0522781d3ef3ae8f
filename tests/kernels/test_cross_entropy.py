"""The fused cross-entropy and its gradient are as accurate as PyTorch's with the logits widened to fp32."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernels import cross_entropy as kernel  # noqa: E402
from tests.kernels.precision import assert_as_accurate, normal  # noqa: E402

pytestmark = pytest.mark.torch

SHAPES = [(1, 1), (3, 31), (5, 32), (4, 101), (17, 7)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def inputs(n, v, dtype, device, ignored=()):
    logits = normal(n, v, dtype=dtype, device=device, scale=3.0)
    target = torch.randint(0, v, (n,), generator=torch.Generator().manual_seed(1))
    target[list(ignored)] = -100
    return logits, target.to(device)


def with_gradient(loss_of, logits, target, **options):
    leaf = logits.detach().clone().requires_grad_()
    loss = loss_of(leaf, target, **options)
    loss.backward()
    return loss, leaf.grad


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "v"), SHAPES)
def test_loss_and_gradient_are_as_accurate_as_pytorchs(n, v, dtype, reduction, device):
    logits, target = inputs(n, v, dtype, device, ignored=[1] if n > 1 else ())
    ours = with_gradient(kernel.cross_entropy, logits, target, reduction=reduction)
    theirs = with_gradient(kernel.reference, logits, target, reduction=reduction)
    true = with_gradient(kernel.reference, logits.double(), target, reduction=reduction)
    for found, reference, exact in zip(ours, theirs, true, strict=True):
        assert_as_accurate(found, reference, exact, roundings=4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_the_gradient_takes_the_logits_memory(dtype, device):
    logits, target = inputs(5, 101, dtype, device, ignored=[2])
    loss, grad = kernel.loss_and_gradient(logits, target)
    lost = logits.clone()
    same_loss, same_grad = kernel.loss_and_gradient(lost, target, inplace=True)
    assert same_grad.data_ptr() == lost.data_ptr()
    assert torch.equal(same_loss, loss)
    assert torch.equal(same_grad, grad)
    leaf = logits.clone().requires_grad_()
    (kernel.cross_entropy(leaf, target, inplace=True) * 2).backward()
    assert torch.equal(leaf.grad, grad * 2)
    assert leaf.grad.data_ptr() == leaf.data_ptr()


def test_an_ignored_row_gives_no_loss_and_a_gradient_of_zeros(device):
    logits, target = inputs(4, 40, torch.float32, device, ignored=[0, 3])
    logits[0] = float("nan")
    loss, grad = kernel.loss_and_gradient(logits, target)
    assert torch.allclose(loss, kernel.reference(logits[1:3], target[1:3]))
    assert not grad[[0, 3]].any()
    own, _ = kernel.loss_and_gradient(logits[1:3].contiguous(), target[1:3], ignore_index=int(target[1]))
    assert torch.allclose(own, kernel.reference(logits[2:3], target[2:3]))


def test_a_mean_over_no_rows_is_nan_as_pytorchs(device):
    logits, target = inputs(2, 5, torch.float32, device, ignored=[0, 1])
    loss, grad = kernel.loss_and_gradient(logits, target)
    assert loss.isnan()
    assert kernel.reference(logits, target).isnan()
    assert not grad.any()
    assert kernel.cross_entropy(logits[:0], target[:0]).isnan()
    assert kernel.cross_entropy(logits, target, reduction="sum") == 0


@pytest.mark.parametrize("wrong", [-1, 40, 2**40])
def test_a_target_outside_the_vocabulary_gives_nan_for_its_row_alone(wrong, device):
    logits, target = inputs(3, 40, torch.float32, device)
    target[1] = wrong
    loss, grad = kernel.loss_and_gradient(logits, target, reduction="sum")
    assert loss.isnan()
    assert grad[1].isnan().all()
    assert grad[[0, 2]].isfinite().all()


def test_logits_of_minus_infinity_and_very_large_ones_are_borne(device):
    logits = torch.full((2, 70), float("-inf"), device=device)
    logits[0, [3, 50]] = 1e4
    logits[1, 69] = -1e4
    loss, grad = kernel.loss_and_gradient(logits, torch.tensor([50, 69], device=device), reduction="sum")
    assert torch.allclose(loss, torch.tensor(2.0, device=device).log())
    assert torch.allclose(grad[0, [3, 50]], torch.tensor([0.5, -0.5], device=device))
    assert not grad[1].any()


def test_without_a_gradient_none_is_made_and_the_loss_is_the_same(device):
    logits, target = inputs(3, 40, torch.float32, device)
    before = logits.clone()
    assert torch.equal(kernel.cross_entropy(logits, target, inplace=True), kernel.loss_and_gradient(logits, target)[0])
    assert torch.equal(logits, before)


def test_a_second_backward_is_refused(device):
    logits, target = inputs(3, 40, torch.float32, device)
    loss = kernel.cross_entropy(logits.requires_grad_(), target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="cannot serve a second backward"):
        loss.backward()


@pytest.mark.parametrize(
    ("logits", "target", "reduction", "message"),
    [
        (torch.zeros(3), torch.zeros(3).long(), "mean", r"logits must have 2 dimensions; its shape is \(3,\)"),
        (torch.zeros(3, 4), torch.zeros(2).long(), "mean", r"target must have shape \(3,\); its shape is \(2,\)"),
        (torch.zeros(3, 4), torch.zeros(3), "mean", "target must be one of int64, int32; it is float32"),
        (torch.zeros(3, 4).double(), torch.zeros(3).long(), "mean", r"logits must be one of .*; it is float64"),
        (torch.zeros(4, 3).t(), torch.zeros(3).long(), "mean", "logits must be contiguous"),
        (torch.zeros(3, 0), torch.zeros(3).long(), "mean", r"at least one column; their shape is \(3, 0\)"),
        (torch.zeros(3, 4), torch.zeros(3).long(), "none", "reduction must be mean or sum; it is 'none'"),
    ],
)
def test_what_does_not_fit_is_refused(logits, target, reduction, message, device):
    with pytest.raises(ValueError, match=message):
        kernel.cross_entropy(logits.to(device), target.to(device), reduction=reduction)


def test_it_moves_each_logit_twice():
    assert kernel.bytes_moved(torch.zeros(3, 5).half()) == 2 * 15 * 2
