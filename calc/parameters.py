"""How many parameters a model has: total, active for a token, embedding, trainable; by component and layer kind."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from calc.breakdown import Breakdown, Component, Formula, unique_names
from calc.lora import lora_parameters as lora_parameters
from calc.model.spec import ModelSpec, Stack, Tower
from calc.model.weights import Part, Weight
from calc.quantities import left_out

LORA = Formula(
    r"<r> \cdot (<k> + <d>)",
    "LoRA, arXiv 2106.09685, section 4.1",
    "https://arxiv.org/abs/2106.09685",
    ("A is r x k and B is d x r; the base weights are frozen",),
)


@dataclass(frozen=True, slots=True)
class ParameterAnswer:
    """Counts of parameters. `active` is what one token uses, its embedding table included; `trainable` is `total` unless LoRA is on.

    `active_breakdown` has the paths of `breakdown`, with the experts alone that one token is sent to.
    """

    spec: ModelSpec
    breakdown: Breakdown
    active_breakdown: Breakdown
    total: int
    active: int
    embedding: int
    trainable: int
    textbook: TextbookCount
    remarks: tuple[str, ...] = ()

    @property
    def not_in_total(self) -> dict[str, int]:
        """Parameters of each tower that the published checkpoint holds and the model class does not build."""
        return {tower.name: tower_parameters(tower) for tower in self.spec.towers if not tower.in_total}

    @property
    def stored_bytes(self) -> int:
        """Bytes of the class's tensors as its checkpoint declares them: in its format, and the rest in the config's dtype."""
        from calc.serving.weights import checkpoint_weights

        stored = checkpoint_weights(self.spec)
        return stored.stage_bytes(range(len(stored.pattern)), 1)

    @property
    def stored_format(self) -> str:
        """The format that the checkpoint declares, its dtype where it declares none."""
        return self.spec.quantization.label if self.spec.quantization else self.spec.dtype

    @property
    def active_without_embedding(self) -> int:
        """Active parameters without the input table, as some cards count (gpt-oss); a tied table is the head, and stays."""
        return self.active if self.spec.tied else self.active - self.embedding

    def as_json(self) -> dict[str, Any]:
        """The answer with the keys of `python -m calc params`."""
        return {
            "model": self.spec.name,
            "architecture": self.spec.architecture,
            "total": self.total,
            "active": self.active,
            "active_without_embedding": self.active_without_embedding,
            "embedding": self.embedding,
            "trainable": self.trainable,
            "tied": self.spec.tied,
            "stored_bytes": self.stored_bytes,
            "stored_format": self.stored_format,
            "components": self.breakdown.components(),
            "not_in_total": self.not_in_total,
            "textbook": self.textbook.as_json(),
            "assumptions": [*self.spec.assumptions, *self.remarks],
            "unread": list(self.spec.unread),
            "notes": list(self.spec.notes),
        }


class ParametersPlan(BaseModel):
    """What to count besides the parameters themselves."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lora_rank: Annotated[int | None, BeforeValidator(left_out)] = Field(
        None, ge=1, le=65536, description="LoRA rank r; left out: every parameter trains"
    )
    lora_targets: str = Field(
        "all-linear",
        min_length=1,
        max_length=500,
        description='LoRA targets: "all-linear", or module names with commas',
    )

    @property
    def idle(self) -> dict[str, str]:
        """Fields that change nothing with the others as they are, each with the reason."""
        return {} if self.lora_rank else {"lora_targets": "lora_rank is left out: every parameter trains"}


def parameters(spec: ModelSpec, plan: ParametersPlan = ParametersPlan()) -> ParameterAnswer:  # noqa: B008 (frozen)
    """Count the parameters of a model, exact to one.

    A LoRA rank above 0 counts the adapters on the targets as the trainable parameters; the head is not a target of
    "all-linear" (peft's convention). InputError when a target is not a linear layer of the model (`calc.lora`).
    """
    tree, active = _tree(spec), _tree(spec, active=True)
    total = int(tree.total)
    embedding = sum(weight.parameters for weight in spec.embeddings)
    trainable = lora_parameters(spec, plan.lora_rank, plan.lora_targets) if plan.lora_rank else total
    return ParameterAnswer(
        spec,
        Breakdown(tree, "parameters"),
        Breakdown(active, "parameters"),
        total,
        int(active.total),
        embedding,
        trainable,
        textbook(spec, total),
    )


@lru_cache(maxsize=128)
def _tree(spec: ModelSpec, active: bool = False) -> Component:
    """The tree of the whole model, or of what one token uses; a spec hashes by identity, so a slider move finds it made."""
    parts = [Component("embedding", children=_leaves(spec.embeddings, spec))]
    parts += [_stack(spec.layers, spec, active)]
    if spec.final_norm:
        parts.append(Component("final_norm", children=_leaves(spec.final_norm.weights, spec)))
    if spec.head:
        parts.append(Component("head", children=_leaves(spec.head, spec)))
    parts += [_part(part, spec, active) for part in spec.other]
    for tower in spec.towers:
        if tower.in_total:
            children = [_part(part, spec, active) for part in tower.parts]
            children += [_stack(tower.stack, spec, active)] if len(tower.stack) else []
            parts.append(Component(tower.name, children=tuple(children)))
    return Component("parameters", children=tuple(part for part in parts if part.children))


def _stack(stack: Stack, spec: ModelSpec, active: bool) -> Component:
    """`layers` once with its count, or one node a kind when the model has several."""
    kinds = [
        Component(kind.kind, children=unique_names(_parts(parts, spec, active)), count=count)
        for kind, parts, count in zip(stack.kinds, stack.kind_parts, stack.counts, strict=True)
    ]
    kinds = [kind for kind in kinds if kind.children]
    if len(kinds) == 1:
        return Component("layers", children=kinds[0].children, count=kinds[0].count)
    return Component("layers", children=unique_names(kinds))


def _parts(parts: tuple[Part, ...], spec: ModelSpec, active: bool) -> list[Component]:
    made = [_part(part, spec, active) for part in parts]
    return [part for part in made if part.children]


def _part(part: Part, spec: ModelSpec, active: bool) -> Component:
    """A part in all its copies, or in those that one token uses: all but the experts it is not routed to. Nothing where an
    earlier layer holds the weights."""
    count = min(part.active, part.copies) if active else part.copies
    return Component(part.name, children=_leaves(part.weights, spec) if count else (), count=count or 1)


def _leaves(weights: tuple[Weight, ...], spec: ModelSpec) -> tuple[Component, ...]:
    return unique_names([_leaf(weight, spec) for weight in weights])


def _leaf(weight: Weight, spec: ModelSpec) -> Component:
    formula = Formula(weight.latex, spec.source, spec.url)
    return Component(weight.name, weight.parameters, formula=formula, numbers=weight.numbers)


def tower_parameters(tower: Tower) -> int:
    """All parameters of a tower."""
    layers = sum(
        count * sum(part.parameters for part in kind)
        for kind, count in zip(tower.stack.kind_parts, tower.stack.counts, strict=True)
    )
    return layers + sum(part.parameters for part in tower.parts)


@dataclass(frozen=True, slots=True)
class TextbookCount:
    """The form that courses teach for a Llama block, V h + L (12.04 h^2 + 12.36 h), against the exact count."""

    total: int
    exact: int
    reasons: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {"total": self.total, "difference": self.exact - self.total, "reasons": list(self.reasons)}


def textbook(spec: ModelSpec, total: int) -> TextbookCount:
    """The textbook count and why it differs: an untied head, the real FFN width, GQA, experts, biases that are not there."""
    h, depth = spec.hidden_size, spec.num_hidden_layers
    value = spec.vocab_size * h + round(depth * (12.04 * h * h + 12.36 * h))
    reasons = []
    if spec.head:
        head = sum(weight.parameters for weight in spec.head)
        reasons.append(f"leaves out the untied head: {head:,} parameters")
    block = sum(
        count * sum(part.parameters for part in kind)
        for kind, count in zip(spec.layers.kind_parts, spec.layers.counts, strict=True)
    )
    assumed = round(depth * (12.04 * h * h + 12.36 * h))
    reasons.append(
        f"assumes {assumed:,} parameters in the {depth} layers (MHA, a gated MLP of 2.68 h, biases everywhere); this model has {block:,}"
    )
    left_out = total - block - spec.vocab_size * h - sum(weight.parameters for weight in spec.head)
    if left_out:
        reasons.append(f"leaves out {left_out:,} in norms, position tables and towers outside the layers")
    return TextbookCount(value, total, tuple(reasons))
