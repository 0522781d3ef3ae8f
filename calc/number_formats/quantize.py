"""Rounding of an array to a format and back: what a model computes with after its weights were stored so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from calc.errors import InputError
from calc.number_formats import floats
from calc.number_formats.table import FP4, IQ4_NL, NF4, NumberFormat, number_format

Array = NDArray[np.float64]
_SUPER = 256  # values of a super-block of llama.cpp's K types


def quantize(values: NDArray[np.floating], name: str) -> NDArray[np.float32]:
    """The values as a format stores them, in fp32, shape kept. Blocks lie along the last axis; scales come from the values alone.

    Rounding is to the nearest. llama.cpp's K and IQ4 types here take the scale of the extremes; llama-quantize searches for a
    better one, so its error is lower. InputError for an unknown format, for a row that its blocks do not divide, and for values
    that are not finite.
    """
    form = number_format(name)
    given = np.asarray(values, dtype=np.float64)
    if not given.size or not np.isfinite(given).all():
        raise InputError.of("values", "these", "there must be some, and all must be finite")
    row = given.shape[-1] if given.ndim else 1
    if form.block_size and row % form.block_size:
        raise InputError.of(
            "values", f"{row} in a row", f"{name} has blocks of {form.block_size}, which must divide it"
        )
    blocks = given.reshape(-1, form.block_size or row)
    return _RULES[name](form, blocks).reshape(given.shape).astype(np.float32)


def _half(values: Array) -> Array:
    return floats.FP16.round(values)


def _divided(values: Array, scale: Array) -> Array:
    """values / scale, 0 where the scale is."""
    return np.divide(values, scale, out=np.zeros_like(values), where=scale != 0)


def _away(values: Array) -> Array:
    """Rounded to whole numbers, halves away from zero (C's roundf)."""
    return np.sign(values) * np.floor(np.abs(values) + 0.5)


def _signed_extreme(blocks: Array) -> Array:
    """The value of the largest magnitude of each block."""
    return np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), -1)


def _plain(form: NumberFormat, blocks: Array) -> Array:
    assert form.encoding
    return form.encoding.round(blocks)


def _by_tensor(form: NumberFormat, blocks: Array) -> Array:
    """The tensor's largest magnitude becomes the format's."""
    scale = np.float64(np.float32(np.abs(blocks).max() / form.max)) * np.ones_like(blocks)
    return np.asarray(_plain(form, _divided(blocks, scale)) * scale)


def _microscaling(form: NumberFormat, blocks: Array) -> Array:
    """The scale is the power of two of the block's largest magnitude over that of the format's largest value (OCP, section 6.3)."""
    _, highest = np.frexp(form.max)
    _, exponent = np.frexp(np.abs(blocks).max(-1, keepdims=True))
    scale = np.ldexp(1.0, np.clip(exponent - highest, -127, 127))
    return np.asarray(_plain(form, blocks / scale) * scale)


def _nvfp4(form: NumberFormat, blocks: Array) -> Array:
    """The tensor's scale brings the largest block scale to E4M3's largest value; a block's brings its largest magnitude to 6."""
    whole = np.float64(np.float32(np.abs(blocks).max() / (floats.E4M3.largest * form.max)))
    if whole == 0:
        return np.zeros_like(blocks)
    scale = floats.E4M3.round(np.abs(blocks).max(-1, keepdims=True) / form.max / whole) * whole
    return _plain(form, _divided(blocks, scale * np.ones_like(blocks))) * scale


def _nearest(values: Array, levels: tuple[float, ...]) -> Array:
    table = np.asarray(levels, dtype=np.float64)
    return np.asarray(table[np.searchsorted((table[1:] + table[:-1]) / 2, values)])


def _of_table(levels: tuple[float, ...], form: NumberFormat, blocks: Array) -> Array:
    """Levels of the block's largest magnitude."""
    scale = np.abs(blocks).max(-1, keepdims=True) * np.ones_like(blocks)
    return np.asarray(_nearest(_divided(blocks, scale), levels) * scale)


def _int8(form: NumberFormat, blocks: Array) -> Array:
    scale = np.abs(blocks).max(-1, keepdims=True) / form.max * np.ones_like(blocks)
    return np.asarray(np.rint(_divided(blocks, scale)) * scale)


def _int4(form: NumberFormat, blocks: Array) -> Array:
    """From the smallest to the largest value of the block, zero among them, which is a whole number of steps."""
    low, high = np.minimum(blocks.min(-1, keepdims=True), 0), np.maximum(blocks.max(-1, keepdims=True), 0)
    scale = _half((high - low) / form.max) * np.ones_like(blocks)
    zero = np.rint(_divided(-low * np.ones_like(blocks), scale))
    return np.asarray((np.clip(np.rint(_divided(blocks, scale)) + zero, 0, form.max) - zero) * scale)


def _ggml_symmetric(form: NumberFormat, blocks: Array) -> Array:
    """Q4_0 and Q5_0: the value of the largest magnitude takes the lowest code."""
    scale = _signed_extreme(blocks) / form.min * np.ones_like(blocks)
    codes = np.clip(np.trunc(_divided(blocks, scale) - form.min + 0.5), 0, form.max - form.min)
    return (codes + form.min) * _half(scale)


def _ggml_affine(form: NumberFormat, blocks: Array) -> Array:
    """Q4_1 and Q5_1: from the smallest to the largest value of the block."""
    low = blocks.min(-1, keepdims=True)
    scale = (blocks.max(-1, keepdims=True) - low) / form.max * np.ones_like(blocks)
    codes = np.clip(np.trunc(_divided(blocks - low, scale) + 0.5), 0, form.max)
    return codes * _half(scale) + _half(low)


def _q8_0(form: NumberFormat, blocks: Array) -> Array:
    scale = np.abs(blocks).max(-1, keepdims=True) / form.max * np.ones_like(blocks)
    return _away(_divided(blocks, scale)) * _half(scale)


def _iq4_nl(form: NumberFormat, blocks: Array) -> Array:
    scale = _half(_signed_extreme(blocks) / form.min) * np.ones_like(blocks)
    return np.asarray(_nearest(_divided(blocks, scale), IQ4_NL) * scale)


def _k_symmetric(part: int, scale_low: int, form: NumberFormat, blocks: Array) -> Array:
    """Super-blocks of signed values: each `part` has a whole-number scale of the super-block's fp16 one."""
    parts = blocks.reshape(-1, _SUPER // part, part)
    own = _signed_extreme(parts) / form.min
    whole = _half(_signed_extreme(own.reshape(-1, 1, _SUPER // part)) / scale_low)
    scale = np.clip(np.rint(_divided(own, whole * np.ones_like(own))), scale_low, -scale_low - 1) * whole
    scale = scale * np.ones_like(parts)
    units = _divided(parts, scale)
    codes = np.clip(np.rint(units), form.min, form.max) if form.kind == "integer" else _nearest(units, form.levels)
    return np.asarray((codes * scale).reshape(blocks.shape))


def _k_affine(part: int, scale_most: int, form: NumberFormat, blocks: Array) -> Array:
    """Super-blocks of values above a minimum: each `part` has a whole-number scale and minimum of the super-block's fp16 ones."""
    parts = blocks.reshape(-1, _SUPER // part, part)
    drop = np.maximum(-parts.min(-1, keepdims=True), 0)
    own = np.maximum(parts.max(-1, keepdims=True) + drop, 0) / form.max

    def stored(numbers: Array) -> Array:
        whole = _half(numbers.max(1, keepdims=True) / scale_most) * np.ones_like(numbers)
        return np.clip(np.rint(_divided(numbers, whole)), 0, scale_most) * whole * np.ones_like(parts)

    scale, low = stored(own), stored(drop)
    codes = np.clip(np.rint(_divided(parts + low, scale)), 0, form.max)
    return (codes * scale - low).reshape(blocks.shape)


_RULES: Mapping[str, Callable[[NumberFormat, Array], Array]] = {
    **dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), _plain),
    **dict.fromkeys(("fp8-e4m3", "fp8-e5m2"), _by_tensor),
    **dict.fromkeys(("mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e3m2", "mxfp6-e2m3", "mxfp4"), _microscaling),
    "nvfp4": _nvfp4,
    "nf4": partial(_of_table, NF4),
    "fp4": partial(_of_table, FP4),
    "int8": _int8,
    "int4": _int4,
    "Q8_0": _q8_0,
    "Q6_K": partial(_k_symmetric, 16, -128),
    "Q5_K": partial(_k_affine, 32, 63),
    "Q5_1": _ggml_affine,
    "Q5_0": _ggml_symmetric,
    "Q4_K": partial(_k_affine, 32, 63),
    "Q4_1": _ggml_affine,
    "Q4_0": _ggml_symmetric,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": partial(_k_symmetric, 32, -32),
    "Q3_K": partial(_k_symmetric, 16, -32),
    "Q2_K": partial(_k_affine, 16, 15),
}
