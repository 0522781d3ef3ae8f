"""The tensors of a weight in its scheme, as components of a breakdown: values, scales, zeros, with the share of one rank."""

from __future__ import annotations

from collections.abc import Callable

from calc.breakdown import Component, Formula, Number, unique_names
from calc.model.weights import Part, Split, Weight
from calc.quantization.schemes import FP32, Scheme, Tensor
from calc.units import ceil_div

Assign = Callable[[Part, Weight], Scheme]  # the scheme of each weight of a part


def part_leaves(part: Part, assign: Assign, tp: int = 1, kv: int = 0) -> tuple[Component, ...]:
    """The tensors of a part's weights on one of `tp` ranks; `kv` is the layer's KV heads, of which a rank holds at least one.

    What a format keeps once for a module (a scale of the whole tensor, the group of each input) is there once where several weights
    share it. Checkpoints hold an expert's projections apart.
    """
    names = {weight.name for weight in part.weights}
    seen: set[str] = set()
    found: list[Component] = []
    for weight in part.weights:
        shared = bool(weight.module) and weight.module in seen and not part.expert
        seen.add(weight.module)
        scheme = FP32 if weight.wide else assign(part, weight)
        for tensor in scheme.tensors:
            once = not tensor.rows and not tensor.flat
            if not (once and shared) and not (tensor.name == "bias" and f"{weight.name}_bias" in names):
                found.append(_leaf(weight, tensor, scheme, tp, kv))
    return unique_names(found)


def _leaf(weight: Weight, tensor: Tensor, scheme: Scheme, tp: int, kv: int) -> Component:
    """One tensor's bytes on one rank, rounded up to whole bytes."""
    numbers: dict[str, Number] = dict(weight.numbers)
    if len(weight.shape) == 2:
        output, inputs = weight.shape
        cells, latex = tensor.cells(output.size, inputs.size), tensor.latex(output.latex, inputs.latex)
    else:
        cells, latex = weight.parameters, weight.latex
    ways = _ways(weight, tensor, tp, kv)
    if ways > 1:
        cells = ceil_div(cells, ways)
        numbers["t"] = tp
        by_head = weight.split is Split.KV and kv
        if by_head:
            numbers["k"] = kv
        under = r"\min(<t>, <k>)" if by_head else "<t>"
        latex = rf"\lceil \frac{{{latex}}}{{{under}}} \rceil"
    if tensor.bits % 8 == 0:
        latex = rf"{latex} \cdot {tensor.bits // 8}" if latex else str(tensor.bits // 8)
    else:
        latex = rf"\lceil \frac{{{latex} \cdot {tensor.bits}}}{{8}} \rceil"
    name = f"{weight.name}_{tensor.name}" if tensor.name else weight.name
    formula = Formula(latex, scheme.source, scheme.url, scheme.assumes)
    return Component(name, ceil_div(cells * tensor.bits, 8), formula=formula, numbers=numbers)


def _ways(weight: Weight, tensor: Tensor, tp: int, kv: int) -> int:
    """How many ranks share the tensor: one where it has a single cell along the side that tensor parallelism divides."""
    if weight.split is Split.NONE:
        return 1
    if (
        not tensor.flat
        and len(weight.shape) == 2
        and not (tensor.columns if weight.split is Split.INPUT else tensor.rows)
    ):
        return 1
    return min(tp, kv or tp) if weight.split is Split.KV else tp
