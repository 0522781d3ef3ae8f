"""Tiles of attention, which the kernels of both directions and of decoding share."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kernels.launch import narrow, power_of_2, widen


def head_case(given: dict[str, Any]) -> str:
    """The case of compiled.csv: the columns of the wider of a key's and a value's block."""
    return str(power_of_2(max(given["D"], given["DV"]), 64))


@triton.jit
def dot(a, b):  # type: ignore[no-untyped-def]
    """a · b in fp32, without TF32's rounding of fp32 operands."""
    return tl.dot(widen(a), widen(b), input_precision="ieee")


@triton.jit
def load_rows(ptr, rows, count, D: tl.constexpr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of a (count, D) matrix, widened with zeros to a power of two of at least 16 columns, and below `count`."""
    BD: tl.constexpr = max(16, triton.next_power_of_2(D))
    d = tl.arange(0, BD)
    ptrs = ptr + rows[:, None].to(tl.int64) * D + d[None, :]
    if MASKED:
        x = tl.load(ptrs, mask=(rows[:, None] < count) & (d[None, :] < D), other=0.0)
    elif BD != D:
        x = tl.load(ptrs, mask=d[None, :] < D, other=0.0)
    else:
        x = tl.load(ptrs)
    return x


@triton.jit
def seen(positions, keys, SK, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether the query at a position sees a key; both broadcast."""
    mask = keys < SK
    if CAUSAL:
        mask = mask & (keys <= positions)
    if WINDOWED:
        mask = mask & (keys > positions - window)
    return mask


@triton.jit
def keys_seen(first, BM: tl.constexpr, SK, window, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(start, full_start, full_end, end): keys that any of BM queries from position `first` on sees, and that all see.

    In whole blocks of BN, but for the end; between start and full_start and from full_end on a mask is needed.
    """
    start = 0
    end = SK
    full_start = 0
    full_end = SK
    if CAUSAL:
        end = tl.minimum(SK, tl.maximum(first + BM, 0))
        full_end = tl.minimum(SK, tl.maximum(first + 1, 0))
    full_end = full_end // BN * BN
    if WINDOWED:
        start = tl.minimum(tl.maximum(first - window + 1, 0) // BN * BN, end)
        full_end = tl.maximum(full_end, start)
        full_start = tl.minimum(tl.cdiv(tl.maximum(first + BM - window, 0), BN) * BN, full_end)
        full_start = tl.maximum(full_start, start)
    return start, full_start, full_end, end


@triton.jit
def store_rows(ptr, x, rows, count, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores the rows of x below `count`, and their first D columns, into a (count, D) matrix."""
    d = tl.arange(0, x.shape[1])
    ptrs = ptr + rows[:, None].to(tl.int64) * D + d[None, :]
    tl.store(ptrs, narrow(x, ptr.dtype.element_ty), mask=(rows[:, None] < count) & (d[None, :] < D))
