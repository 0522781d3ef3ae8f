"""The norms of transformers, each by the program that computes it, operator by operator."""

from __future__ import annotations

from calc.model.weights import Dim, Norm
from calc.training.autograd import operators as ops
from calc.training.autograd.operators import FULL
from calc.training.autograd.tape import Tape, Value, Weight


def _rms(t: Tape, x: Value, rows: Dim) -> tuple[Value, Value]:
    """fp32 input and 1 / sqrt(mean(x ** 2) + eps), as the eager RMS norms compute them."""
    wide = ops.cast(t, x, FULL, "fp32_input")
    squares = ops.mean(t, ops.power(t, wide), rows)
    shifted = ops.scale(t, squares)
    return wide, ops.unary(t, shifted, "inverse_root", "result")


def llama_norm(t: Tape, x: Value, norm: Norm, weight: Weight, rows: Dim) -> Value:
    """weight * (x * rsqrt(mean(x ** 2) + eps)).to(x.dtype)"""
    wide, inverse = _rms(t, x, rows)
    normal = ops.mul(t, wide, inverse, "normalized")
    del wide, inverse
    return (
        ops.mul_weight(t, ops.cast(t, normal, x.bytes, "normalized"), weight)
        if norm.weight
        else ops.cast(t, normal, x.bytes)
    )


def wide_norm(t: Tape, x: Value, norm: Norm, weight: Weight, rows: Dim) -> Value:
    """(weight * x * rsqrt(...)).to(x.dtype): scaled in fp32"""
    wide, inverse = _rms(t, x, rows)
    normal = ops.mul(t, wide, inverse, "normalized")
    del wide, inverse
    return ops.cast(t, ops.mul_weight(t, normal, weight) if norm.weight else normal, x.bytes, "output")


def gemma_norm(t: Tape, x: Value, norm: Norm, weight: Weight, rows: Dim) -> Value:
    """(x * rsqrt(...) * (1 + weight.float())).to(x.dtype)"""
    wide, inverse = _rms(t, x, rows)
    normal = ops.mul(t, wide, inverse, "normalized")
    del wide, inverse
    return ops.cast(t, ops.mul_shifted_weight(t, normal, weight), x.bytes, "output")


def layer_norm(t: Tape, x: Value, norm: Norm, weight: Weight, rows: Dim) -> Value:
    """F.layer_norm: keeps its input, the mean and the inverse deviation; fp32 under autocast."""
    return ops.native_norm(t, ops.cast(t, x, FULL if t.autocast else x.bytes, "input"), weight, rows, 2)


def rms_norm(t: Tape, x: Value, norm: Norm, weight: Weight, rows: Dim) -> Value:
    """F.rms_norm: keeps its input and the inverse root; fp32 under autocast."""
    return ops.native_norm(t, ops.cast(t, x, FULL if t.autocast else x.bytes, "input"), weight, rows, 1)


def centered_norm(t: Tape, x: Value, norm: Norm, weight: Weight, rows: Dim) -> Value:
    """Cohere's LayerNorm in fp32: (weight.float() * (x - mean) * rsqrt(((x - mean) ** 2).mean() + eps)).to(x.dtype)"""
    wide = ops.cast(t, x, FULL, "fp32_input")
    middle = ops.mean(t, wide, rows)
    variance = ops.mean(t, ops.power(t, ops.subtract(t, wide, middle, "centered")), rows)
    centered = ops.subtract(t, wide, middle, "centered")
    inverse = ops.unary(t, ops.scale(t, variance), "inverse_root", "result")
    normal = ops.mul(t, centered, inverse, "normalized")
    del wide, centered, inverse
    return ops.cast(t, ops.mul_wide_weight(t, normal, weight), x.bytes, "output")


def powered_norm(t: Tape, x: Value, norm: Norm, weight: Weight, rows: Dim) -> Value:
    """Gemma 4's: (x.float() * (mean(x.float() ** 2) + eps) ** -0.5 * weight.float()).to(x.dtype)"""
    wide = ops.cast(t, x, FULL, "fp32_input")
    squares = ops.scale(t, ops.mean(t, ops.power(t, wide), rows), "mean_square")
    inverse = ops.power(t, squares, "inverse_root")
    normal = ops.mul(t, wide, inverse, "normalized")
    del wide, squares, inverse
    return ops.cast(t, ops.mul_wide_weight(t, normal, weight) if norm.weight else normal, x.bytes, "output")


NORMS = {
    "llama": llama_norm,
    "wide": wide_norm,
    "gemma": gemma_norm,
    "layer": layer_norm,
    "rms": rms_norm,
    "centered": centered_norm,
    "powered": powered_norm,
}
