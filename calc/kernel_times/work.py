"""What each kernel computes and moves: the reference that its measured time is kept relative to.

The reference time is max(FLOPs / dense peak, bytes / memory bandwidth) + 3 µs; the 3 µs stand for a kernel's fixed cost,
so that the kept ratios stay near one for small kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from calc.kernel_times.grids import FloatArray, Numbers

FIXED_SECONDS: Final = 3e-6


class NumberFormat(NamedTuple):
    """The peak that a matrix product runs at, and the bytes of one element of its activations and of its weights."""

    peak: str
    activation: float
    weight: float


# block formats carry a scale for each block: 32 bits for 128 x 128 (fp8_block), 8 for 16 (nvfp4) and for 32 (mxfp4), 16 for 128 (int4)
FORMATS: Final = {
    "bf16": NumberFormat("bf16", 2, 2),
    "fp16": NumberFormat("fp16", 2, 2),
    "fp8": NumberFormat("fp8", 1, 1),
    "fp8_block": NumberFormat("fp8", 1 + 4 / 128, 1 + 4 / 128**2),
    "nvfp4": NumberFormat("fp4", 0.5 + 1 / 16, 0.5 + 1 / 16),
    "mxfp4": NumberFormat("bf16", 2, 0.5 + 1 / 32),  # weights alone; activations stay in 16 bits
    "mxfp4_mxfp8": NumberFormat("fp8", 1 + 1 / 32, 0.5 + 1 / 32),
    "int8": NumberFormat("int8", 1, 1),
    "int8_weight": NumberFormat("bf16", 2, 1),
    "int4": NumberFormat("bf16", 2, 0.5 + 2 / 128),  # weights alone
}
KV_BYTES: Final = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "nvfp4": 0.5 + 1 / 16, "int4": 0.5 + 2 / 128}


# how unevenly the router spreads tokens, as a table's coordinate: a power law with exponent 1.01 or 1.2
SKEWS: Final = {"balanced": 1.0, "power_law": 2.0, "power_law_1.2": 4.0}


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs at a number format's peak, bytes of memory, and where the kernel lies in its table."""

    flops: Numbers
    bytes: Numbers
    peak: str
    point: tuple[Numbers, ...]

    def seconds(self, peak: float, bandwidth: float, fixed: float = FIXED_SECONDS) -> FloatArray:
        """The reference time at those FLOP/s and bytes/s."""
        return np.asarray(np.maximum(np.divide(self.flops, peak), np.divide(self.bytes, bandwidth)) + fixed)


def gemm(m: Numbers, n: Numbers, k: Numbers, dtype: str) -> Work:
    """[m, k] x [k, n] into 16 bits: 2 m n k FLOPs; both operands are read once and the product is written."""
    kind = FORMATS[dtype]
    m, n, k = np.asarray(m, dtype=float), np.asarray(n, dtype=float), np.asarray(k, dtype=float)
    moved = kind.activation * m * k + kind.weight * n * k + 2.0 * m * n
    return Work(2.0 * m * n * k, moved, kind.peak, (m, n, k))


def _window(window: Numbers) -> FloatArray:
    """The window as a table's coordinate: none is as wide as the widest knot."""
    return np.asarray(np.where(np.asarray(window) > 0, window, 2.0**20))


def visible_pairs(query: Numbers, context: Numbers, window: Numbers, *, causal: bool) -> FloatArray:
    """Query-key pairs of one head and sequence: `query` new tokens after `context` cached ones; a window of 0 is none.

    A causal query at position i sees i + 1 keys, or `window` of them when that is fewer.
    """
    q, c = np.asarray(query, dtype=float), np.asarray(context, dtype=float)
    w = np.where(np.asarray(window) > 0, window, c + q)
    if not causal:
        return np.asarray(q * np.minimum(c + q, w))
    growing = np.clip(w - c, 0, q)  # the queries that still see every key before them
    return np.asarray(growing * c + growing * (growing + 1) / 2 + (q - growing) * w)


def context_attention(
    batch: Numbers,
    query: Numbers,
    context: Numbers,
    heads: Numbers,
    kv_heads: Numbers,
    head_dim: Numbers,
    window: Numbers,
    kv_dtype: str,
    *,
    causal: bool,
) -> Work:
    """Scores and their product with V of one layer: 4 head_dim FLOPs a pair; Q and the output in 16 bits, K and V once."""
    b, h, g = (np.asarray(x, dtype=float) for x in (batch, heads, kv_heads))
    q, d = np.asarray(query, dtype=float), np.asarray(head_dim, dtype=float)
    pairs = visible_pairs(query, context, window, causal=causal)
    keys = np.where(np.asarray(window) > 0, np.minimum(q + context, q + window), q + context)
    moved = 4.0 * b * q * h * d + 2.0 * KV_BYTES[kv_dtype] * b * keys * g * d
    return Work(4.0 * b * h * d * pairs, moved, "bf16", (q, b * h, h / g, d, _window(window)))


def decode_attention(
    batch: Numbers,
    context: Numbers,
    heads: Numbers,
    kv_heads: Numbers,
    head_dim: Numbers,
    window: Numbers,
    kv_dtype: str,
) -> Work:
    """One new token a sequence over `context` cached ones (or the window's): K and V are read once, by all heads of a group together."""
    b, h, g = (np.asarray(x, dtype=float) for x in (batch, heads, kv_heads))
    d = np.asarray(head_dim, dtype=float)
    keys = np.where(np.asarray(window) > 0, np.minimum(context, window), context)
    moved = 2.0 * KV_BYTES[kv_dtype] * b * keys * g * d + 4.0 * b * h * d
    return Work(
        4.0 * b * h * d * keys, moved, "bf16", (np.asarray(context, dtype=float), b * g, h / g, d, _window(window))
    )


def mla_context(
    batch: Numbers,
    query: Numbers,
    context: Numbers,
    heads: Numbers,
    qk_head_dim: Numbers,
    v_head_dim: Numbers,
) -> Work:
    """Multi-head latent attention of a prompt with keys and values expanded for every head; the projections are GEMMs of their own."""
    b, h, q = (np.asarray(x, dtype=float) for x in (batch, heads, query))
    pairs = visible_pairs(query, context, 0, causal=True)
    width = np.asarray(qk_head_dim, dtype=float) + v_head_dim
    moved = 2.0 * b * h * width * (2.0 * q + context)  # Q, K, V and the output in 16 bits
    return Work(2.0 * b * h * width * pairs, moved, "bf16", (q, b, h))


def mla_decode(
    batch: Numbers, context: Numbers, heads: Numbers, kv_lora_rank: Numbers, qk_rope: Numbers, kv_dtype: str
) -> Work:
    """Multi-head latent attention of one new token a sequence, absorbed: every head reads the same latent of kv_lora_rank + qk_rope."""
    b, h, keys = (np.asarray(x, dtype=float) for x in (batch, heads, context))
    latent = np.asarray(kv_lora_rank, dtype=float) + qk_rope
    moved = KV_BYTES[kv_dtype] * b * keys * latent + 2.0 * b * h * (latent + kv_lora_rank)
    return Work(2.0 * b * h * keys * (latent + kv_lora_rank), moved, "bf16", (keys, b, h))


def experts(
    tokens: Numbers,
    hidden: Numbers,
    intermediate: Numbers,
    num_experts: Numbers,
    top_k: Numbers,
    ep: Numbers,
    tp: Numbers,
    dtype: str,
    skew: str = "balanced",
    *,
    gated: bool,
) -> Work:
    """The grouped GEMMs of one rank's experts (gate and up, then down), when `tokens` of the whole group are spread evenly.

    A rank has num_experts / ep experts, each of intermediate / tp, and tokens x top_k / ep rows. It reads the weights of the
    experts that have a row: E (1 - (1 - k/E)^tokens) of E in expectation.
    """
    kind = FORMATS[dtype]
    t, h, e, k = (np.asarray(x, dtype=float) for x in (tokens, hidden, num_experts, top_k))
    inner = np.asarray(intermediate, dtype=float) / tp
    local, rows = e / ep, t * k / ep
    matrices = 3.0 if gated else 2.0
    touched = local * -np.expm1(t * np.log1p(-np.minimum(k / e, 1 - 1e-9)))
    moved = touched * matrices * h * inner * kind.weight + rows * ((kind.activation + 2.0) * h + matrices * 2.0 * inner)
    return Work(2.0 * matrices * rows * h * inner, moved, kind.peak, (t, rows / local, local, h * inner, SKEWS[skew]))


def gated_delta_rule(
    batch: Numbers, query: Numbers, k_heads: Numbers, v_heads: Numbers, k_dim: int, v_dim: int
) -> Work:
    """The short convolution and the gated delta rule of one layer: in chunks of 64 for a prompt, one step for a single token.

    A head of V keeps a k_dim x v_dim state in 32 bits, read and written once; a token costs 6 k_dim v_dim FLOPs for its update and
    its query, and within its chunk 2 x 64 (k_dim + v_dim).
    """
    b, q, kh, vh = (np.asarray(x, dtype=float) for x in (batch, query, k_heads, v_heads))
    tokens, width = b * q, 2.0 * kh * k_dim + vh * v_dim
    flops = tokens * vh * (6.0 * k_dim * v_dim + np.where(q > 1, 128.0 * (k_dim + v_dim), 0.0))
    moved = 8.0 * b * vh * k_dim * v_dim + 2.0 * tokens * (3.0 * width + vh * v_dim)
    return Work(flops, moved, "bf16", (q, b, vh, kh))


def element_wise(moved: Numbers) -> Work:
    """A kernel that only moves bytes."""
    return Work(0.0, np.asarray(moved, dtype=float), "", (np.asarray(moved, dtype=float),))


def expert_exchange_bytes(phase: str, tokens: Numbers, hidden: Numbers, top_k: Numbers, ranks: Numbers) -> FloatArray:
    """Bytes that one rank sends to the others when its tokens go to top_k experts spread evenly: a token goes once to each rank that
    has one of its experts, n (1 - (1 - 1/n)^k) ranks in expectation, in 8 bits out (dispatch) and in 16 back (combine)."""
    t, h, n = (np.asarray(x, dtype=float) for x in (tokens, hidden, ranks))
    targets = n * -np.expm1(np.asarray(top_k, dtype=float) * np.log1p(-1 / np.maximum(n, 1 + 1e-9)))
    element = 1.0 if phase == "dispatch" else 2.0
    return np.asarray(t * h * element * targets * (n - 1) / n)


def collective_bytes(kind: str, size: Numbers, ranks: Numbers) -> FloatArray:
    """Bytes that one rank sends: `size` is the whole tensor (all-reduce, all-gather, reduce-scatter), what one rank holds for all
    others and itself (all-to-all), or the message (send). Ring: 2 (n-1)/n, else (n-1)/n."""
    s, n = np.asarray(size, dtype=float), np.asarray(ranks, dtype=float)
    share = {"all_reduce": 2.0 * (n - 1) / n, "send": np.ones_like(n)}.get(kind, (n - 1) / n)
    return np.asarray(s * share)


COLLECTIVES: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
