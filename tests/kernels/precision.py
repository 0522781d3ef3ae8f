"""How far a result lies from the float64 one, held against how far plain PyTorch lies in the same dtype."""

import math

import torch

UNIT = 2.0**-24  # unit roundoff of fp32: the largest relative error of one rounding


def error(found, true):
    """Root mean square of found - true over that of true, in float64; NaN when a poisoned element was never written."""
    found, true = found.detach().cpu().double(), true.detach().cpu().double()
    assert found.shape == true.shape
    size = true.pow(2).mean().sqrt().item()
    off = (found - true).pow(2).mean().sqrt().item()
    return off / size if size else off


def assert_as_accurate(found, reference, true, multiple=1.5, roundings=2):
    """`found` errs at most `multiple` times as much as `reference` does, plus what so many `roundings` in fp32 may add.

    PyTorch's order of sums follows the processor's vectors, and where it happens to err by almost nothing a multiple of that
    allows nothing: each result still has the roundings of its own last operations (the sum, its factor, the store).
    """
    assert found.dtype == reference.dtype, (found.dtype, reference.dtype)
    assert true.dtype == torch.float64
    ours, theirs = error(found, true), error(reference, true)
    assert math.isfinite(theirs), "the reference itself has NaN or infinity"
    assert ours <= multiple * theirs + roundings * UNIT, f"error ratio {ours:.3e}, PyTorch's {theirs:.3e}"


def normal(*shape, dtype=torch.float32, device="cpu", seed=0, scale=1.0):
    """Normal random numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)


def with_gradients(function, inputs, dout, **options):
    """[output, gradient of each input] of `function` at the inputs, for the gradient `dout` of its output."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves, **options)
    out.backward(dout)
    return [out, *(leaf.grad for leaf in leaves)]


def assert_both_ways_as_accurate(function, reference, inputs, dout, roundings=4, **options):
    """Output and gradients of `function` are as accurate as those of `reference`, whose float64 run gives the truth."""
    ours = with_gradients(function, inputs, dout, **options)
    theirs = with_gradients(reference, inputs, dout, **options)
    true = with_gradients(reference, [x.double() for x in inputs], dout.double(), **options)
    for found, rival, exact in zip(ours, theirs, true, strict=True):
        assert_as_accurate(found, rival, exact, roundings=roundings)
