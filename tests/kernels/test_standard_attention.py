"""Standard attention, the reference of the flash kernels, is PyTorch's own and sees the keys that its mask spells out."""

import pytest

torch = pytest.importorskip("torch")

from kernels import standard_attention as kernel  # noqa: E402
from tests.kernels.precision import normal  # noqa: E402

pytestmark = pytest.mark.torch


def heads(*sizes):
    return [normal(1, h, s, d, dtype=torch.float64, seed=seed) for seed, (h, s, d) in enumerate(sizes)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_it_is_pytorchs_attention_with_grouped_heads(causal, scale):
    q, k, v = heads((6, 13, 8), (2, 13, 8), (2, 13, 5))
    found = kernel.standard_attention(q, k, v, causal=causal, scale=scale)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    assert torch.allclose(found, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("sq", "sk", "window"), [(5, 5, None), (3, 7, None), (7, 3, None), (6, 6, 2), (4, 9, 3), (9, 4, 3)]
)
def test_with_a_mask_it_is_pytorchs_attention_over_the_keys_spelt_out(sq, sk, window):
    seen = torch.zeros(sq, sk, dtype=torch.bool)
    for query in range(sq):
        position = query + sk - sq  # the last query is where the last key is
        for key in range(sk):
            seen[query, key] = key <= position and (window is None or key > position - window)
    q, k, v = heads((2, sq, 8), (2, sk, 8), (2, sk, 8))
    found = kernel.standard_attention(q, k, v, causal=True, window=window)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    sighted = seen.any(1)
    assert torch.allclose(found[:, :, sighted], theirs[:, :, sighted], rtol=1e-12, atol=1e-14)
    assert not found[:, :, ~sighted].any()


def test_a_window_is_that_of_transformers():
    masking_utils = pytest.importorskip("transformers.masking_utils")
    overlay = masking_utils.sliding_window_overlay(3)
    causal = masking_utils.causal_mask_function
    theirs = [[bool(overlay(0, 0, q, k)) and bool(causal(0, 0, q, k)) for k in range(8)] for q in range(8)]
    assert kernel.visible(8, 8, True, 3, torch.device("cpu")).tolist() == theirs
