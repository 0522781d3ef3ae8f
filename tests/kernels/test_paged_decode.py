"""Paged decoding reads each sequence's own blocks and nothing else, as accurately as PyTorch on the gathered rows."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernels import paged_decode as kernel  # noqa: E402
from tests.kernels.precision import assert_as_accurate, normal  # noqa: E402

pytestmark = pytest.mark.torch

NOWHERE = 1_000_000  # a block far outside the cache
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# lengths, tokens a block, heads, heads of keys, dimension of keys, of values
CASES = {
    "one token": ([1], 16, 1, 1, 16, 16),
    "odd": ([1, 37, 65], 5, 3, 3, 37, 21),
    "grouped": ([70, 16, 33], 16, 6, 2, 16, 16),
    "all heads share": ([129], 8, 5, 1, 16, 16),
    "many heads": ([19, 40], 16, 35, 1, 16, 16),
}


def paged(lengths, block, widths, dtype, device, spare=3):
    """Caches of the given widths whose blocks are shuffled, and NaN wherever no token lies; their table and lengths."""
    needed = [-(-length // block) for length in lengths]
    blocks = sum(needed) + spare
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(3)).tolist()
    table = torch.full((len(lengths), max(needed) + 2), NOWHERE, dtype=torch.int32)
    filled = torch.zeros(blocks, block, dtype=torch.bool)
    for b, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        mine = [order.pop() for _ in range(count)]
        table[b, :count] = torch.tensor(mine, dtype=torch.int32)
        for i in range(length):
            filled[mine[i // block], i % block] = True
    caches = [normal(blocks, block, *width, dtype=dtype, seed=seed) for seed, width in enumerate(widths)]
    for cache in caches:
        cache[~filled] = float("nan")
    return (
        [cache.to(device) for cache in caches],
        table.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def inputs(case, dtype, device):
    lengths, block, h, hkv, d, dv = CASES[case]
    (k, v), table, lengths = paged(lengths, block, ((hkv, d), (hkv, dv)), dtype, device)
    return normal(len(lengths), h, d, dtype=dtype, device=device, seed=9), k, v, table, lengths


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_decoding_is_as_accurate_as_pytorchs_attention_over_the_gathered_rows(case, dtype, device):
    q, k, v, table, lengths = inputs(case, dtype, device)
    out = kernel.paged_decode(q, k, v, table, lengths)
    true = kernel.reference(q.double(), k.double(), v.double(), table, lengths)
    assert_as_accurate(out, kernel.reference(q, k, v, table, lengths), true)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("h", "value_dim", "rest"), [(3, 32, 16), (18, 37, 5), (2, 16, 0)])
def test_decoding_latents_is_as_accurate_as_pytorchs(h, value_dim, rest, dtype, device):
    (cache,), table, lengths = paged([37, 1, 70], 8, ((value_dim + rest,),), dtype, device)
    q = normal(3, h, value_dim + rest, dtype=dtype, device=device, seed=9)
    given = {"value_dim": value_dim, "scale": 0.17}
    out = kernel.paged_decode_latent(q, cache, table, lengths, **given)
    true = kernel.reference_latent(q.double(), cache.double(), table, lengths, **given)
    assert_as_accurate(out, kernel.reference_latent(q, cache, table, lengths, **given), true)


def test_decoding_latents_is_mla_with_its_up_projections_absorbed(device):
    """DeepSeek-V2's attention written out (keys and values of every head made from the latents) gives the same."""
    h, rank, rope, nope, dv, s = 3, 32, 16, 24, 20, 41
    (cache,), table, lengths = paged([s], 8, ((rank + rope,),), torch.float32, device)
    up_k, up_v = normal(h, nope, rank, device=device, seed=5), normal(h, dv, rank, device=device, seed=6)
    q_nope, q_rope = normal(h, nope, device=device, seed=7), normal(h, rope, device=device, seed=8)
    scale = (nope + rope) ** -0.5
    q = torch.cat([torch.einsum("hn,hnr->hr", q_nope, up_k), q_rope], -1)[None]
    latent = kernel.paged_decode_latent(q, cache, table, lengths, value_dim=rank, scale=scale)
    found = torch.einsum("hr,hvr->hv", latent[0], up_v)

    rows = kernel.gather(cache.unsqueeze(2), table[0], s)[0, 0].double()
    c, k_rope = rows[:, :rank], rows[:, rank:]
    keys = torch.einsum("sr,hnr->hsn", c, up_k.double())
    scores = torch.einsum("hn,hsn->hs", q_nope.double(), keys) + torch.einsum("hp,sp->hs", q_rope.double(), k_rope)
    values = torch.einsum("sr,hvr->hsv", c, up_v.double())
    true = torch.einsum("hs,hsv->hv", (scores * scale).softmax(-1), values)
    assert torch.allclose(found.double(), true, rtol=1e-5, atol=1e-5)


def test_a_sequence_without_tokens_gives_zeros(device):
    q, k, v, table, lengths = inputs("grouped", torch.float16, device)
    full = kernel.paged_decode(q, k, v, table, lengths)
    lengths[1] = 0
    out = kernel.paged_decode(q, k, v, table, lengths)
    assert not out[1].any()
    assert torch.equal(out[0], full[0])


@pytest.mark.parametrize("fault", ["block", "negative block", "length"])
def test_a_table_that_points_outside_the_cache_gives_nan_for_that_sequence_alone(fault, device):
    q, k, v, table, lengths = inputs("grouped", torch.float16, device)
    full = kernel.paged_decode(q, k, v, table, lengths)
    if fault == "length":
        lengths[0] = 130  # the table has room for 112
    else:
        table[0, 1] = NOWHERE if fault == "block" else -1
    out = kernel.paged_decode(q, k, v, table, lengths)
    assert out[0].isnan().all()
    assert torch.allclose(out[1:], full[1:], rtol=1e-2, atol=1e-3)


def test_keys_are_split_until_a_large_gpu_is_full(monkeypatch):
    monkeypatch.setattr(kernel, "is_interpreted", lambda: False)
    assert kernel._splits(programs=1, longest=200) == 1
    assert kernel._splits(programs=8, longest=8192) == 32
    assert kernel._splits(programs=8, longest=131072) == 128
    assert kernel._splits(programs=5000, longest=131072) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 6, 16)}, "k_cache must be float32; it is float16"),
        ({"q": torch.zeros(3, 6, 15).half()}, r"must be \(N, T, Hkv, 15\) and .*; they are"),
        ({"q": torch.zeros(3, 5, 16).half()}, r"heads of k_cache \(2\) must divide the heads of q \(5\)"),
        ({"v": torch.zeros(3, 16, 2, 16).half()}, r"they are .* and \(3, 16, 2, 16\)"),
        ({"k": torch.zeros(16, 2, 16).half()}, r"k_cache must have 4 dimensions; its shape is \(16, 2, 16\)"),
        ({"table": torch.zeros(3, 8)}, "block_table must be int32; it is float32"),
        ({"table": torch.zeros(2, 8, dtype=torch.int32)}, r"block_table must have 3 rows, .*; it is \(2, 8\)"),
        ({"lengths": torch.zeros(2, dtype=torch.int32)}, r"lengths must have shape \(3,\); its shape is \(2,\)"),
        ({"lengths": torch.zeros(3, dtype=torch.int64)}, "lengths must be int32; it is int64"),
    ],
)
def test_what_does_not_fit_is_refused(change, message, device):
    given = dict(zip(("q", "k", "v", "table", "lengths"), inputs("grouped", torch.float16, device), strict=True))
    given |= {name: x.to(device) for name, x in change.items()}
    with pytest.raises(ValueError, match=message):
        kernel.paged_decode(*given.values())


@pytest.mark.parametrize(
    ("columns", "value_dim", "message"),
    [
        (47, 32, r"cache must be \(N, T, 47\), as q has 47 columns"),
        (48, 49, "value_dim must be 1 to 48; it is 49"),
        (48, 0, "value_dim must be 1 to 48; it is 0"),
    ],
)
def test_latents_that_do_not_fit_are_refused(columns, value_dim, message, device):
    (cache,), table, lengths = paged([5], 8, ((48,),), torch.float16, device)
    q = torch.zeros(1, 3, columns, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match=message):
        kernel.paged_decode_latent(q, cache, table, lengths, value_dim=value_dim, scale=1.0)


def test_it_counts_each_row_of_the_cache_once():
    q = torch.zeros(2, 4, 8).half()
    assert kernel.flops(100, 4, 8, 8) == 2 * 100 * 4 * 16
    assert kernel.bytes_moved(100, 2 * 16 * 2, q, q) == 100 * 64 + 2 * 2 * 4 * 8 * 2
