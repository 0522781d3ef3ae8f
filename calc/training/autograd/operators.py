"""PyTorch's operators on a tape: what each makes, saves for backward and makes in backward.

What is saved follows tools/autograd/derivatives.yaml of PyTorch 2.13, number formats its type promotion and CUDA's autocast lists.
"""

from __future__ import annotations

from collections.abc import Sequence

from calc.model.weights import Dim, dim
from calc.training.autograd.tape import FIXED, Edge, Extent, Tape, Value, Weight

ONE = dim("1", 1)
HALF, FULL, LONG, BOOL = 2, 4, 8, 1  # bytes of a 16-bit number, an fp32 number, an index, a mask


def cast(t: Tape, x: Value, size: int, name: str = "cast") -> Value:
    """`x.to(dtype)`: the same tensor where nothing changes."""
    if x.bytes == size:
        return x
    out = t.like(x, name, size)
    t.record([x], out, [], lambda g, to=x.bytes: (t.like(g, size=to),))
    return out


def add(t: Tape, a: Value, b: Value, name: str = "sum") -> Value:
    """a + b; nothing is saved, and the gradient goes to both as it is."""
    out = t.like(a, name, max(a.bytes, b.bytes))

    def backward(g: Value, to: tuple[int, int] = (a.bytes, b.bytes)) -> tuple[Value, ...]:
        return tuple(g if size == g.bytes else t.like(g, size=size) for size in to)

    t.record([a, b], out, [], backward)
    return out


def scale(t: Tape, x: Value, name: str = "scaled") -> Value:
    """x times a constant, its negative, or the like: nothing is saved."""
    out = t.like(x, name)
    t.record([x], out, [], lambda g: (t.like(g),))
    return out


def scale_in_place(t: Tape, x: Value) -> Value:
    """x times a constant, into its own memory; its gradient is a tensor of its own."""
    out = t.view(x)
    t.record([x], out, [], lambda g: (t.like(g),))
    return out


def shift(t: Tape, x: Value, size: int, name: str = "shifted") -> Value:
    """x plus a constant of `size` bytes an element: nothing is saved, and the gradient passes as it is."""
    out = t.like(x, name, max(x.bytes, size))
    t.record([x], out, [], lambda g, to=x.bytes: (_to(t, g, to),))
    return out


def mul(t: Tape, a: Value, b: Value, name: str = "product") -> Value:
    """a * b, where b may be smaller and broadcast: each is saved if the other needs a gradient."""
    out = t.like(a, name, max(a.bytes, b.bytes))
    same = a.dim.size == b.dim.size and a.extent == b.extent
    wants = (a.grad, b.grad)
    sizes, b_dim, b_extent = (a.bytes, b.bytes), b.dim, b.extent

    def backward(g: Value, *saved: Value) -> tuple[Value | None, Value | None]:
        to_a = _to(t, t.like(g), sizes[0]) if wants[0] else None
        if not wants[1]:
            return to_a, None
        to_b = t.like(g)  # the whole product, summed where b was broadcast
        return to_a, _to(t, to_b, sizes[1]) if same else t.new("gradient", b_dim, b_extent, sizes[1])

    t.record([a, b], out, [*([b] if a.grad else []), *([a] if b.grad else [])], backward)
    return out


def _to(t: Tape, value: Value, size: int) -> Value:
    return value if value.bytes == size else t.like(value, size=size)


def weight_gradient(t: Tape, weight: Weight, size: int | None = None) -> None:
    """The gradient of a weight: made in the format of the matmul, and cast to the weight's where autocast was between."""
    made = t.new(f"{weight.name}_gradient", weight.dim, FIXED, size or weight.bytes)
    if made.bytes != weight.bytes:
        made = t.new(f"{weight.name}_gradient", weight.dim, FIXED, weight.bytes)
    t.keep_gradient(made)


def mul_weight(t: Tape, x: Value, weight: Weight, name: str = "output") -> Value:
    """x times a learned vector: x is saved if the vector trains."""
    out = t.like(x, name, max(x.bytes, weight.bytes))
    wants_x, to = x.grad, x.bytes

    def backward(g: Value, *saved: Value) -> tuple[Value | None]:
        to_x = _to(t, t.like(g), to) if wants_x else None
        if weight.trains:
            product = t.like(g)
            weight_gradient(t, weight)
            del product
        return (to_x,)

    t.record([x, Edge() if weight.trains else None], out, [x] if weight.trains else [], backward, wants_x)
    return out


def mul_shifted_weight(t: Tape, x: Value, weight: Weight) -> Value:
    """x * (1 + weight.float()): both are saved, each if the other needs a gradient."""
    shifted = t.new("shifted_weight", weight.dim, FIXED, FULL)
    shifted = t.new("shifted_weight", weight.dim, FIXED, FULL) if weight.bytes != FULL else shifted
    return _mul_vector(t, x, weight, shifted)


def mul_wide_weight(t: Tape, x: Value, weight: Weight) -> Value:
    """x * weight.float(): both are saved, each if the other needs a gradient."""
    if weight.bytes == FULL:
        return mul_weight(t, x, weight)
    return _mul_vector(t, x, weight, t.new("fp32_weight", weight.dim, FIXED, FULL))


def _mul_vector(t: Tape, x: Value, weight: Weight, vector: Value) -> Value:
    """fp32 x times what was made of a learned vector in fp32."""
    out = t.like(x, "output", FULL)
    wants_x, size = x.grad, weight.dim

    def backward(g: Value, *saved: Value) -> tuple[Value | None]:
        to_x = t.like(g) if wants_x else None
        if weight.trains:
            whole = t.like(g)
            summed = t.new("gradient", size, FIXED, FULL)
            del whole
            if weight.bytes == FULL:
                t.keep_gradient(summed)
            else:
                weight_gradient(t, weight)
        return (to_x,)

    saved = [*([vector] if wants_x else []), *([x] if weight.trains else [])]
    t.record([x, Edge() if weight.trains else None], out, saved, backward)
    return out


def native_norm(t: Tape, x: Value, weight: Weight, rows: Dim, moments: int) -> Value:
    """One operator: it saves its input and `moments` fp32 numbers a row."""
    out = t.like(x, "output")
    kept = [t.new(name, rows, x.extent, FULL) for name in ("inverse_root", "mean")[:moments]]
    wants_x = x.grad

    def backward(g: Value, *saved: Value) -> tuple[Value | None]:
        to_x = t.like(g) if wants_x else None
        if weight.trains:
            for _ in range(moments):  # with a mean there is a bias too
                weight_gradient(t, weight)
        return (to_x,)

    t.record([x, Edge() if weight.trains else None], out, [x, *kept], backward)
    return out


def matmul_bytes(t: Tape, x: Value) -> int:
    """The format that a matmul of x computes in."""
    return HALF if t.autocast else x.bytes


def linear(
    t: Tape, x: Value, weight: Weight, out_dim: Dim, name: str, bias: Weight | None = None, extent: Extent | None = None
) -> Value:
    """F.linear: the input is saved if the weight trains; under autocast both are cast, the weight once for all uses."""
    size = matmul_bytes(t, x)
    inputs = cast(t, x, size, f"{name}_input")
    copy = t.weight_copy(weight) if t.autocast and weight.bytes != size else None
    bias_copy = t.weight_copy(bias) if bias and t.autocast and bias.bytes != size else None
    out = t.new(name, out_dim, extent or x.extent, size)
    wants_x, cast_weight, cast_bias = inputs.grad, copy is not None, bias_copy is not None
    meta = (inputs.dim, inputs.extent)

    def backward(g: Value, *saved: Value) -> tuple[Value | None, ...]:
        to_x = t.new("gradient", *meta, size) if wants_x else None
        to_copy = t.new(f"{weight.name}_gradient", weight.dim, FIXED, size) if weight.trains and cast_weight else None
        if weight.trains and not cast_weight:
            weight_gradient(t, weight, size)
        if bias and bias.trains and cast_bias:
            return to_x, to_copy, t.new(f"{bias.name}_gradient", bias.dim, FIXED, size)
        if bias and bias.trains:
            weight_gradient(t, bias, size)
        return to_x, to_copy, None

    saved = [*([inputs] if weight.trains else []), *([copy] if copy is not None and wants_x else [])]
    trained = weight.trains or (bias is not None and bias.trains)
    edges = [inputs, copy if cast_weight else Edge() if trained else None, bias_copy]
    t.record(edges, out, saved, backward, wants_x)
    return out


def unary(t: Tape, x: Value, name: str, saves: str = "input") -> Value:
    """An elementwise function that saves its input (silu, gelu), its result (relu, tanh, sigmoid), or nothing."""
    out = t.like(x, name)
    saved = {"input": [x], "result": [out], "": []}[saves] if x.grad else []
    t.record([x], out, saved, lambda g, *saved: (t.like(g),))
    return out


def subtract(t: Tape, x: Value, rows: Value, name: str = "difference") -> Value:
    """x - rows, one number a row: nothing is saved; the rows' gradient is the negative, summed."""
    out = t.like(x, name)
    meta = (rows.dim, rows.extent, rows.bytes)

    def backward(g: Value) -> tuple[Value, Value]:
        negative = t.like(g)
        summed = t.new("gradient", *meta)
        del negative
        return g, summed

    t.record([x, rows], out, [], backward)
    return out


def power(t: Tape, x: Value, name: str = "power") -> Value:
    """x ** n: the input is saved; backward makes x ** (n - 1), n times that, and the product."""
    x = cast(t, x, FULL if t.autocast else x.bytes, "fp32_input")
    out = t.like(x, name)

    def backward(g: Value, *saved: Value) -> tuple[Value]:
        lower = t.like(g)
        times = t.like(g)
        made = t.like(g)
        del lower, times
        return (made,)

    t.record([x], out, [x], backward)
    return out


def mean(t: Tape, x: Value, rows: Dim = ONE, name: str = "mean") -> Value:
    """The mean over the features, one a row: nothing is saved, and backward spreads the gradient out."""
    out = t.new(name, rows, x.extent, x.bytes)
    meta = (x.dim, x.extent, x.bytes)
    t.record([x], out, [], lambda g: (t.new("gradient", *meta),))
    return out


def softmax(t: Tape, x: Value, name: str, size: int | None = None) -> Value:
    """Softmax in its own number format, to which its input is cast first (fused for fp16 only): the result is saved."""
    wide = cast(t, x, size or (FULL if t.autocast else x.bytes), "fp32_input")
    out = t.like(wide, name)
    t.record([wide], out, [out] if wide.grad else [], lambda g, *saved: (t.like(g),))
    return out


def dropout(t: Tape, x: Value, probability: float, name: str = "dropped") -> Value:
    """CUDA's fused dropout keeps a mask of one byte an element; none at probability 0."""
    if not probability:
        return x
    out = t.like(x, name)
    mask = t.like(x, f"{name}_mask", BOOL)
    t.record([x], out, [mask], lambda g, *saved: (t.like(g),))
    return out


def kernel(t: Tape, inputs: Sequence[Value], out: Value, saved: Sequence[Value]) -> None:
    """One fused operator with a fused backward that makes all input gradients at once."""
    meta = [(value.dim, value.extent, value.bytes) if value.grad else None for value in inputs]

    def backward(g: Value, *kept: Value) -> list[Value | None]:
        return [t.new("gradient", *shape) if shape else None for shape in meta]

    t.record(inputs, out, saved, backward)


def split(t: Tape, x: Value, dims: Sequence[Dim]) -> list[Value]:
    """Views of parts of x whose gradients are joined again in backward (`chunk`, `split`)."""
    parts = [Value(t, x.storage, part, None) for part in dims]
    meta = (x.dim, x.extent, x.bytes)
    t.record([x], parts, [], lambda *g: (t.new("gradient", *meta),))
    return parts


def slices(t: Tape, x: Value, dims: Sequence[Dim]) -> list[Value]:
    """Views of parts of x by indexing: each part's gradient is padded to the whole by itself."""
    parts = []
    meta = (x.dim, x.extent, x.bytes)
    for part in dims:
        view = Value(t, x.storage, part, None)
        t.record([x], view, [], lambda g: (t.new("gradient", *meta),))
        parts.append(view)
    return parts


def join(t: Tape, parts: Sequence[Value], whole: Dim, name: str) -> Value:
    """torch.cat along the features: nothing is saved, and the gradients are views of the whole's."""
    out = t.new(name, whole, parts[0].extent, parts[0].bytes)
    dims = [part.dim for part in parts]
    t.record(parts, out, [], lambda g: [Value(t, g.storage, part, None) for part in dims])
    return out


def copy(t: Tape, x: Value, name: str, whole: Dim | None = None) -> Value:
    """A contiguous copy, or a repetition to `whole`."""
    out = t.new(name, whole or x.dim, x.extent, x.bytes)
    meta = (x.dim, x.extent, x.bytes)
    t.record([x], out, [], lambda g: (t.new("gradient", *meta),))
    return out


def view_of(t: Tape, x: Value) -> Value:
    """The same tensor under a new handle."""
    return t.view(x)
