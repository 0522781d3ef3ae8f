"""Adapters on a linear layer as peft computes them: LoRA, DoRA, which gives each output a learned length, and QLoRA's NF4."""

from __future__ import annotations

from typing import Final

from calc.model.weights import Dim, dim
from calc.training.autograd import operators as ops
from calc.training.autograd.operators import FULL, HALF
from calc.training.autograd.tape import FIXED, Edge, Tape, Value, Weight
from calc.training.states.tensors import Lora

VARIANTS: Final = (
    "adapters: rsLoRA and LoRA+ take the same bytes (another scaling, other learning rates); AdaLoRA is not modelled and takes more: its "
    "first rank in the place of r, r more numbers a layer, and three copies of the adapters for their importance",
)


def adapted(t: Tape, x: Value, y: Value, shape: tuple[Dim, Dim], name: str, lora: Lora, bias: bool) -> Value:
    """peft's Linear on x, where the layer itself gives y: y + B(A(x in fp32)) * scaling, cast back to y's format; litgpt's LoRALinear,
    whose adapters have y's format, next to quantised weights too.

    `shape` are the layer's input and output features; DoRA takes the layer's `bias` off y first.
    """
    inputs, out = shape
    r = dim("r", lora.rank)
    down = Weight(f"{name}_lora_A", r * inputs, True, lora.width)  # autocast's copies are told apart by these names
    up = Weight(f"{name}_lora_B", out * r, True, lora.width)
    with t.part(f"{name}_adapter"):
        if lora.quantised and not lora.litgpt:
            return _next_to_quantised(t, x, y, (down, up), r, out, lora)
        wide = ops.dropout(t, ops.cast(t, x, lora.width, "adapter_input"), lora.dropout, "adapter_dropped")
        if lora.magnitude:
            scaled = _decomposed(t, wide, y, (down, up), shape, r, bias)
        else:
            low = ops.linear(t, wide, down, r, "lora_A")
            high = ops.linear(t, low, up, out, "lora_B")
            scaled = ops.scale(t, high, "scaled")
            del low, high
        return ops.cast(t, ops.add(t, y, scaled, "adapted"), y.bytes, "adapted")


def _next_to_quantised(
    t: Tape, x: Value, y: Value, weights: tuple[Weight, Weight], r: Dim, out: Dim, lora: Lora
) -> Value:
    """peft's Linear4bit: a clone of y, plus B(A(x)) * scaling, in y's format unless autocast runs."""
    clone = t.like(y, "cloned")
    t.record([y], clone, [], lambda g: (g,))
    del y
    wide = x if t.autocast else ops.cast(t, x, lora.width, "adapter_input")
    wide = ops.dropout(t, wide, lora.dropout, "adapter_dropped")
    low = ops.linear(t, wide, weights[0], r, "lora_A")
    high = ops.linear(t, low, weights[1], out, "lora_B")
    scaled = ops.scale(t, high, "scaled")
    del low, high
    if not t.autocast:
        scaled = ops.cast(t, scaled, clone.bytes, "scaled")
    return ops.add(t, clone, scaled, "adapted")


def scaled(t: Tape, y: Value, name: str) -> Value:
    """litgpt's AdapterV2Linear on a layer's output: scale * (y + bias), both learned; the sum is kept for the scale."""
    bias, scale = (Weight(f"{name}_adapter_{kind}", y.dim, True, y.bytes) for kind in ("bias", "scale"))
    shifted = t.like(y, "shifted")

    def backward(g: Value) -> tuple[Value]:
        ops.weight_gradient(t, bias)
        return (g,)

    with t.part(f"{name}_adapter"):
        t.record([y, Edge()], shifted, [], backward)
        del y
        return ops.mul_weight(t, shifted, scale, "scaled")


def quantised_linear(t: Tape, x: Value, weight: Weight, out: Dim, name: str, lora: Lora) -> Value:
    """A linear layer whose weight lies in the base format, by the library that has the format."""
    return (_gptq_linear if lora.base == "gptq-int4" else _four_bit_linear)(t, x, weight, out, name, lora)


def _gptq_linear(t: Tape, x: Value, weight: Weight, out: Dim, name: str, lora: Lora) -> Value:
    """AutoGPTQ's QuantLinear without its kernels: the weight unpacked by int32 shifts, as int8, less its zeros, times its scales in
    fp16; the product keeps that, of which the input's gradient is made (qlinear_cuda_old.py)."""
    inputs = ops.cast(t, x, HALF, f"{name}_input")
    wide = t.new(f"{name}_shifted", weight.dim, FIXED, FULL)
    narrow = t.new(f"{name}_int8", weight.dim, FIXED, 1)
    del wide
    masked = t.new(f"{name}_int8", weight.dim, FIXED, 1)
    del narrow
    less = t.new(f"{name}_less_zeros", weight.dim, FIXED, 1)
    copy = t.new(f"{name}_dequantised", weight.dim, FIXED, HALF)
    del masked, less
    y = t.new(name, out, x.extent, HALF)
    meta = (inputs.dim, inputs.extent, HALF)
    t.record([inputs], y, [copy], lambda g, *saved: (t.new("gradient", *meta),))
    return ops.cast(t, y, x.bytes, name)


def _four_bit_linear(t: Tape, x: Value, weight: Weight, out: Dim, name: str, lora: Lora) -> Value:
    """bitsandbytes' Linear4bit in 16 bits: a working copy of the weight is dequantised, used and dropped, in backward again.

    With double quantisation its absmaxes come out in fp32 first. x is not kept but by bitsandbytes up to 0.42
    (autograd/_functions.py, MatMul4Bit: ctx.tensors); the result is cast back to x's format. Up to 1,536 tokens a kernel of
    bitsandbytes may do without the copy, which is counted all the same.
    """
    inputs = ops.cast(t, x, HALF, f"{name}_input")
    double = lora.base == "nf4"
    blocks = Dim(-(-weight.dim.size // 64), rf"\lceil \frac{{{weight.dim.latex}}}{{64}} \rceil", weight.dim.numbers)
    copies = [t.new("absmaxes", blocks, FIXED, FULL) for _ in range(2 * double)]
    copies.append(_dequantised(t, weight, name, lora))
    y = t.new(name, out, x.extent, HALF)
    copies.clear()
    meta = (inputs.dim, inputs.extent, HALF)

    def backward(g: Value, *saved: Value) -> tuple[Value]:
        absmaxes = [t.new("absmaxes", blocks, FIXED, FULL) for _ in range(double)]
        copy = _dequantised(t, weight, name, lora)
        del absmaxes
        made = t.new("gradient", *meta)
        del copy
        return (made,)

    t.record([inputs], y, [inputs] if lora.keeps_input else [], backward, saves_weight=True)
    return ops.cast(t, y, x.bytes, name)


def _dequantised(t: Tape, weight: Weight, name: str, lora: Lora) -> Value:
    """The weight in 16 bits. Lightning quantises from fp16 (fabric/plugins/precision/bitsandbytes.py), which is then cast to bf16."""
    copy = t.new(f"{name}_dequantised", weight.dim, FIXED, HALF)
    return t.new(f"{name}_cast", weight.dim, FIXED, HALF) if lora.litgpt else copy


def _decomposed(
    t: Tape, x: Value, y: Value, weights: tuple[Weight, Weight], shape: tuple[Dim, Dim], r: Dim, bias: bool
) -> Value:
    """DoRA's addition to y: (m - 1) * y + m * B(A(x)) * scaling, m the learned lengths over those of W + B A (peft 0.21)."""
    out = shape[1]
    whole = _merged_weight(t, weights, shape, r)
    lengths = t.new("lengths", out, FIXED, FULL)
    magnitude = Weight(f"{weights[0].name}_magnitude", out, True, FULL)
    m = t.new("magnitudes", out, FIXED, FULL)

    def backward(g: Value, *saved: Value) -> tuple[None]:
        ops.weight_gradient(t, magnitude)
        return (None,)

    t.record([Edge()], m, [lengths], backward)
    del lengths
    low = ops.linear(t, x, weights[0], r, "lora_A")
    high = ops.linear(t, low, weights[1], out, "lora_B")
    del low
    base = ops.shift(t, y, t.bytes, "without_bias") if bias else y
    less = t.new("magnitudes_less_one", out, FIXED, FULL)
    t.record([m], less, [], lambda g: (g,))
    first = _stretched(t, less, base, "stretched")
    second = ops.scale(t, _stretched(t, m, high, "stretched_update"), "scaled")
    whole.clear()
    return ops.add(t, first, second, "decomposed")


def _merged_weight(t: Tape, weights: tuple[Weight, Weight], shape: tuple[Dim, Dim], r: Dim) -> list[Value]:
    """W and B A in fp32, their product by way of an identity matrix, and their sum for a moment, of which the norm is taken.

    No gradient flows back; the handles are what peft holds until the layer has run: with what A and B saved of the product.
    """
    inputs, out = shape
    eye = t.new("identity", inputs * inputs, FIXED, FULL)
    size = ops.matmul_bytes(t, eye)
    saved = [ops.cast(t, eye, size, "identity")]
    if t.autocast:
        t.weight_copy(weights[0])
    saved.append(t.new("identity_lora_A", inputs * r, FIXED, size))
    if t.autocast:
        t.weight_copy(weights[1])
    product = t.new("update", out * inputs, FIXED, size)
    del eye
    if not t.saving:
        saved.clear()
    saved.append(ops.cast(t, product, FULL, "update"))
    del product
    if t.bytes != FULL:
        saved.append(t.new("fp32_weight", out * inputs, FIXED, FULL))
    scaled = t.like(saved[-1], "scaled_update")
    merged = t.like(scaled, "merged_weight")
    del scaled, merged
    return saved


def _stretched(t: Tape, m: Value, x: Value, name: str) -> Value:
    """m * x in fp32, m one number a feature: both are saved; backward makes both whole products before the first is summed."""
    out = t.like(x, name, FULL)
    wants, size, vector = x.grad, x.bytes, m.dim

    def backward(g: Value, *saved: Value) -> tuple[Value, Value | None]:
        to_x = t.like(g) if wants else None
        whole = t.like(g)
        to_m = t.new("gradient", vector, FIXED, FULL)
        del whole
        return to_m, ops.cast(t, to_x, size) if to_x is not None else None

    t.record([m, x], out, [x, *([m] if wants else [])], backward)
    return out
