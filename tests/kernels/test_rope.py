"""RoPE, both ways, is as accurate as transformers' formula in PyTorch, and turns by the paper's angles."""

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernels import rope as kernel  # noqa: E402
from tests.kernels.precision import assert_both_ways_as_accurate, normal  # noqa: E402

pytestmark = pytest.mark.torch


def at(shape, half, device):
    return kernel.angles(torch.arange(3, 3 + shape[2], device=device), half)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("shape", "half"), [((1, 1, 1, 2), 1), ((2, 3, 7, 16), 8), ((1, 2, 9, 37), 18), ((2, 1, 5, 24), 4)]
)
def test_turning_and_its_gradient_are_as_accurate_as_pytorchs(shape, half, dtype, device):
    x, dout = (normal(*shape, dtype=dtype, device=device, seed=seed) for seed in range(2))
    cos, sin = at(shape, half, device)
    assert_both_ways_as_accurate(
        lambda x: kernel.rope(x, cos, sin), lambda x: kernel.reference(x, cos, sin), [x], dout, roundings=2
    )


def test_the_formula_is_that_of_llama_in_transformers(device):
    modeling_llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x = normal(2, 3, 7, 16, device=device)
    cos, sin = at(x.shape, 8, device)
    both = (torch.cat([angle, angle], -1)[None] for angle in (cos, sin))
    theirs, _ = modeling_llama.apply_rotary_pos_emb(x, x, *both)
    assert torch.equal(kernel.reference(x, cos, sin), theirs)


def test_angles_are_the_papers():
    cos, sin = kernel.angles(torch.tensor([0, 1, 100]), 4)
    assert cos[0].tolist() == [1] * 4
    for i in range(4):
        angle = 100 * 10_000 ** (-2 * i / 8)
        assert math.isclose(cos[2, i].item(), math.cos(angle), abs_tol=1e-7)
        assert math.isclose(sin[2, i].item(), math.sin(angle), abs_tol=1e-7)


def test_scores_depend_on_the_distance_alone(device):
    q, k = (normal(1, 1, 1, 32, device=device, seed=seed) for seed in range(2))

    def score(query_at, key_at):
        turned = [
            kernel.rope(x, *kernel.angles(torch.tensor([position], device=device), 16))
            for x, position in ((q, query_at), (k, key_at))
        ]
        return (turned[0].double() * turned[1].double()).sum().item()

    assert math.isclose(score(7, 3), score(1007, 1003), rel_tol=1e-5)


@pytest.mark.parametrize("shape", [(0, 1, 3, 8), (2, 1, 0, 8)])
def test_no_rows_give_none(shape, device):
    cos, sin = at(shape, 4, device)
    assert kernel.rope(torch.zeros(shape, device=device), cos, sin).shape == shape


@pytest.mark.parametrize(
    ("x", "cos", "sin", "message"),
    [
        (torch.zeros(3, 8), torch.zeros(3, 4), torch.zeros(3, 4), r"x must have 4 dimensions; its shape is \(3, 8\)"),
        (torch.zeros(1, 1, 3, 8), torch.zeros(2, 4), torch.zeros(2, 4), r"cos must be \(3, R\) .*; it is \(2, 4\)"),
        (torch.zeros(1, 1, 3, 8), torch.zeros(3, 5), torch.zeros(3, 5), r"R of 1 to 4, .*; it is \(3, 5\)"),
        (torch.zeros(1, 1, 3, 8), torch.zeros(3, 4), torch.zeros(3, 3), r"sin must have shape \(3, 4\)"),
        (torch.zeros(1, 1, 3, 8), torch.zeros(3, 4).half(), torch.zeros(3, 4), "cos must be float32; it is float16"),
        (torch.zeros(1, 1, 8, 3).mT, torch.zeros(3, 4), torch.zeros(3, 4), "x must be contiguous"),
        (torch.zeros(1, 1, 1, 1025), torch.zeros(1, 4), torch.zeros(1, 4), "must be at most 1024; it is 1025"),
    ],
)
def test_what_does_not_fit_is_refused(x, cos, sin, message, device):
    with pytest.raises(ValueError, match=message):
        kernel.rope(x.to(device), cos.to(device), sin.to(device))


def test_it_moves_each_element_twice_and_the_angles_once():
    assert kernel.bytes_moved(torch.zeros(2, 3, 5, 8).half(), torch.zeros(5, 4)) == 2 * 240 * 2 + 2 * 20 * 4
