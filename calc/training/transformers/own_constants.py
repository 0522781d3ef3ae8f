"""What single model classes of transformers keep besides their blocks: ALiBi's biases, masks that are always made, own tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from calc.breakdown import Number
from calc.model.mixers import Attention
from calc.model.spec import ModelSpec
from calc.training.autograd.builder import Settings
from calc.training.model_classes import Modeling, model_class
from calc.training.plan import TrainingPlan

# name, bytes, formula, its numbers, whether each micro-batch has its own, and until when: the arguments of a constant
Row = tuple[str, int, str, dict[str, Number], bool, str]


def class_constants(plan: TrainingPlan, spec: ModelSpec, settings: Settings) -> Iterator[Row]:
    """Those of the model's class."""
    modeling = model_class(spec.architecture).modeling
    if modeling in _CONSTANTS:
        until = "layers" if plan.recompute == "full" else "stack"  # a checkpoint holds its layer's arguments
        yield from _CONSTANTS[modeling](plan, spec, settings, until)


def _attention(spec: ModelSpec) -> Attention:
    mixer = spec.layers.kinds[0].mixer
    assert isinstance(mixer, Attention)
    return mixer


def _bloom(plan: TrainingPlan, spec: ModelSpec, settings: Settings, until: str) -> Iterator[Row]:
    heads, b, s = _attention(spec).num_attention_heads, plan.sequences, plan.seq
    numbers: dict[str, Number] = {"b": b, "a": heads, "s": s}
    yield (
        "alibi",
        settings.bytes * b * heads * s,
        rf"{settings.bytes} \cdot <b> \cdot <a> \cdot <s>",
        numbers,
        True,
        until,
    )
    yield "slopes", 4 * heads, r"4 \cdot <a>", {"a": heads}, False, "stack"
    if plan.recompute == "full":
        yield _returned(plan, spec, 2 if settings.autocast else settings.bytes)


def _returned(plan: TrainingPlan, spec: ModelSpec, size: int) -> Row:
    """The attention weights that a layer returns, which the loop over the layers holds while the next one runs."""
    heads, b, s = _attention(spec).num_attention_heads, plan.sequences, plan.seq
    latex = rf"{size} \cdot <b> \cdot <a> \cdot <s>^{{2}}"
    return "attention_weights", size * b * heads * s**2, latex, {"b": b, "a": heads, "s": s}, True, "stack"


def _falcon(plan: TrainingPlan, spec: ModelSpec, settings: Settings, until: str) -> Iterator[Row]:
    if settings.attention == "sdpa":
        yield "mask", plan.seq**2, "<s>^{2}", {"s": plan.seq}, False, until
    elif plan.recompute == "full":
        yield _returned(plan, spec, settings.bytes)


def _opt(plan: TrainingPlan, spec: ModelSpec, settings: Settings, until: str) -> Iterator[Row]:
    numbers: dict[str, Number] = {"b": plan.sequences, "s": plan.seq}
    yield "position_ids", 8 * plan.sequences * plan.seq, r"8 \cdot <b> \cdot <s>", numbers, True, until


def _gptj(plan: TrainingPlan, spec: ModelSpec, settings: Settings, until: str) -> Iterator[Row]:
    width, size, rows = _attention(spec).rotary_dim, settings.bytes, spec.max_position_embeddings
    numbers: dict[str, Number] = {"s": plan.seq, "d": width}
    yield "sines_and_cosines", size * plan.seq * width, rf"{size} \cdot <s> \cdot <d>", numbers, False, until
    yield "table", 4 * rows * width, r"4 \cdot <n> \cdot <d>", {"n": rows, "d": width}, False, "step"


_CONSTANTS: dict[Modeling, Callable[[TrainingPlan, ModelSpec, Settings, str], Iterator[Row]]] = {
    "bloom": _bloom,
    "falcon": _falcon,
    "gptj": _gptj,
    "opt": _opt,
}
