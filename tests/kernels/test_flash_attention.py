"""Flash attention, both ways, is as accurate as attention with all scores in memory, and sees exactly the keys it should."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernels import flash_attention as kernel  # noqa: E402
from kernels import flash_attention_backward, standard_attention  # noqa: E402
from tests.kernels.attention_error import attention_error  # noqa: E402
from tests.kernels.precision import assert_both_ways_as_accurate, normal, with_gradients  # noqa: E402

pytestmark = pytest.mark.torch

# batch, heads, heads of keys, queries, keys, head dimension, head dimension of values, what is seen
CASES = {
    "one": (1, 1, 1, 1, 1, 1, 1, {}),
    "full": (2, 1, 1, 37, 65, 16, 16, {}),
    "odd head": (1, 2, 2, 19, 33, 37, 21, {}),
    "scale": (1, 1, 1, 17, 17, 16, 16, {"scale": 0.7}),
    "causal": (1, 1, 1, 67, 67, 16, 16, {"causal": True}),
    "causal, grouped": (1, 4, 2, 35, 35, 24, 24, {"causal": True}),
    "causal, all heads share": (1, 3, 1, 33, 33, 16, 32, {"causal": True}),
    "causal, more keys": (1, 1, 1, 19, 70, 16, 16, {"causal": True}),
    "causal, more queries": (1, 1, 1, 53, 20, 16, 16, {"causal": True}),
    "window": (1, 2, 1, 83, 83, 16, 16, {"causal": True, "window": 36}),
    "narrow window": (1, 1, 1, 70, 70, 16, 16, {"causal": True, "window": 5}),
    "window of one": (1, 1, 1, 34, 34, 16, 16, {"causal": True, "window": 1}),
    "window beyond all": (1, 1, 1, 34, 34, 16, 16, {"causal": True, "window": 1000}),
    "window, more keys": (1, 1, 1, 20, 90, 16, 16, {"causal": True, "window": 33}),
    "window, more queries": (1, 1, 1, 90, 20, 16, 16, {"causal": True, "window": 7}),
}


def inputs(case, dtype, device):
    b, h, hkv, sq, sk, d, dv, _ = CASES[case]
    shapes = ((b, h, sq, d), (b, hkv, sk, d), (b, hkv, sk, dv), (b, h, sq, dv))
    return [normal(*shape, dtype=dtype, device=device, seed=seed) for seed, shape in enumerate(shapes)]


def compare(case, dtype, device):
    *given, dout = inputs(case, dtype, device)
    assert_both_ways_as_accurate(kernel.flash_attention, kernel.reference, given, dout, **CASES[case][-1])


@pytest.mark.parametrize("case", CASES)
def test_attention_and_its_gradient_are_as_accurate_in_bf16_as_pytorchs(case, device):
    compare(case, torch.bfloat16, device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", ["odd head", "causal, grouped"])
def test_attention_and_its_gradient_are_as_accurate_as_pytorchs(case, dtype, device):
    compare(case, dtype, device)


# Where a mask's edge meets the edge of a block (16 queries, 32 keys in the interpreter), an error of one key would hide.
@pytest.mark.parametrize(
    ("sq", "sk", "window"),
    [
        *((35, 35 + more, None) for more in (14, 15, 30, 31)),
        *((35, 35 + more, window) for more in (0, 15) for window in (16, 17, 32, 33)),
        *((81, 81, window) for window in (47, 48)),  # wide enough for whole blocks between the mask's two edges
    ],
)
def test_no_key_is_lost_or_gained_at_the_edge_of_a_block(sq, sk, window, device):
    *given, dout = (normal(1, 1, s, 1, device=device, seed=seed) for seed, s in enumerate((sq, sk, sk, sq)))
    mask = {"causal": True, "window": window}
    found = with_gradients(kernel.flash_attention, given, dout, **mask)
    true = with_gradients(kernel.reference, [x.double() for x in given], dout.double(), **mask)
    bounds = attention_error(*given, dout, **mask)
    with torch.no_grad():
        for name, ours, exact, bound in zip(("out", "dq", "dk", "dv"), found, true, bounds, strict=True):
            share = ((ours.double() - exact).abs().cpu() / bound).max().item()
            assert share <= 1, f"{name}: {share:.3g} of what rounding can do"


def test_the_bound_at_the_edge_of_a_block_leaves_no_place_for_a_lost_key():
    """The least that losing one key changes in any row is far above what rounding may do there."""
    q, k, v, dout = (normal(1, 1, 35, 1, seed=seed) for seed in range(4))
    right, wrong = (
        kernel.reference(*(x.double() for x in (q, k, v)), causal=True, window=window) for window in (33, 32)
    )
    bound = attention_error(q, k, v, dout, causal=True, window=33)[0]
    changed = right != wrong
    assert changed.sum() == 3  # queries that see 33 keys and more
    assert ((right - wrong).abs()[changed] > 100 * bound[changed]).all()


@pytest.mark.parametrize("case", ["full", "causal, more queries", "window"])
def test_the_logsumexp_is_that_of_the_scores_a_query_sees(case, device):
    q, k, v, _ = inputs(case, torch.float32, device)
    causal, window = CASES[case][-1].get("causal", False), CASES[case][-1].get("window")
    _, lse = kernel.forward(q, k, v, causal=causal, window=window)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1).double()
    scores = q.double() @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    seen = standard_attention.visible(q.shape[2], k.shape[2], causal, window, q.device)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    assert torch.allclose(lse.double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-6)


def test_scores_far_above_what_exp_can_hold_give_the_largest_ones_value(device):
    q = torch.full((1, 1, 1, 16), 100.0, dtype=torch.bfloat16, device=device)
    k = torch.zeros(1, 1, 40, 16, dtype=torch.bfloat16, device=device)
    k[0, 0, 33] = 100.0
    v = normal(1, 1, 40, 16, dtype=torch.bfloat16, device=device)
    assert torch.equal(kernel.flash_attention(q, k, v)[0, 0, 0], v[0, 0, 33])


def test_hidden_keys_have_no_weight_however_large(device):
    q, k, v = (normal(1, 1, 40, 16, device=device, seed=seed) for seed in range(3))
    visible = kernel.flash_attention(*(x[:, :, :33].contiguous() for x in (q, k, v)), causal=True)
    later = torch.cat([k[:, :, :33], torch.full_like(k[:, :, 33:], 1e30)], 2)
    assert torch.equal(kernel.flash_attention(q, later, v, causal=True)[:, :, :33], visible)


def test_no_keys_give_zeros_and_no_queries_give_nothing(device):
    q, k = torch.ones(1, 2, 3, 16, device=device), torch.ones(1, 2, 0, 16, device=device)
    out, dq, dk, dv = with_gradients(kernel.flash_attention, [q, k, k], torch.ones_like(q))
    assert not out.any()
    assert not dq.any()
    assert (dk.shape, dv.shape) == (k.shape, k.shape)
    out, dq, dk, dv = with_gradients(kernel.flash_attention, [k, q, q], k)
    assert (out.shape, dq.shape) == (k.shape, k.shape)
    assert not dk.any()
    assert not dv.any()


def heads(h, s, d, dtype=torch.float16):
    return torch.zeros(1, h, s, d, dtype=dtype)


@pytest.mark.parametrize(
    ("q", "k", "v", "options", "message"),
    [
        (heads(4, 3, 8)[0], heads(4, 3, 8), heads(4, 3, 8), {}, r"q must have 4 dimensions; its shape is \(4, 3, 8\)"),
        (heads(4, 3, 8), heads(4, 3, 7), heads(4, 3, 8), {}, r"they are \(1, 4, 3, 8\), \(1, 4, 3, 7\) and"),
        (heads(4, 3, 8), heads(4, 3, 8), heads(4, 2, 8), {}, r"and \(1, 4, 2, 8\)"),
        (heads(4, 3, 8), heads(3, 3, 8), heads(3, 3, 8), {}, r"heads of k \(3\) must divide the heads of q \(4\)"),
        (heads(4, 3, 8), heads(4, 3, 8, torch.bfloat16), heads(4, 3, 8), {}, "k must be float16; it is bfloat16"),
        (heads(4, 3, 8, torch.int8), heads(4, 3, 8), heads(4, 3, 8), {}, r"q must be one of .*; it is int8"),
        (heads(4, 8, 3).mT, heads(4, 3, 8), heads(4, 3, 8), {}, r"q must be contiguous; .* strides"),
        (heads(1, 3, 257), heads(1, 3, 257), heads(1, 3, 8), {}, r"of q and k must be 1 to 256; it is 257"),
        (heads(4, 3, 8), heads(4, 3, 8), heads(4, 3, 8), {"window": 3}, "window is 3, causal False"),
        (heads(4, 3, 8), heads(4, 3, 8), heads(4, 3, 8), {"window": 0, "causal": True}, "window is 0, causal True"),
    ],
)
def test_what_does_not_fit_is_refused(q, k, v, options, message, device):
    with pytest.raises(ValueError, match=message):
        kernel.flash_attention(q.to(device), k.to(device), v.to(device), **options)


def test_a_gradient_of_another_shape_is_refused(device):
    q = torch.zeros(1, 1, 3, 16, device=device)
    with pytest.raises(ValueError, match=r"dout must have shape \(1, 1, 3, 16\); its shape is \(1, 1, 3, 8\)"):
        flash_attention_backward.backward(q[..., :8].contiguous(), q, q, q, q, q[..., 0].contiguous())


def test_it_counts_two_products_and_each_byte_once():
    q, k, v = heads(4, 3, 8), heads(2, 5, 8), heads(2, 5, 6)
    assert kernel.flops(q, k, v) == 2 * 4 * 3 * 5 * (8 + 6)
    assert kernel.bytes_moved(q, k, v) == 2 * (4 * 3 * 8 + 2 * 5 * 8 + 2 * 5 * 6 + 4 * 3 * 6) + 4 * 4 * 3
