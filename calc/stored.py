"""What a checkpoint stores against what its class builds, and why the two differ: what a Hub page would say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calc.breakdown import Breakdown
from calc.catalogue import catalogue, load, look
from calc.errors import InputError
from calc.model.spec import ModelSpec
from calc.parameters import ParameterAnswer, ParametersPlan, parameters
from calc.sources.stored import StoredTensor, StoredTensors, Sum, group_of, layer_of, role_of

_VALUES = {"U8": 2, "U16": 4, "I16": 4, "U32": 8, "I32": 8}  # values of 4 bits in one element of a container


@dataclass(frozen=True, slots=True)
class Comparison:
    """Stored elements against the parameters of the class. `difference` is stored minus exact; the reasons with their shares."""

    stored: StoredTensors
    difference: int | None
    reasons: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The object `stored` of `python -m calc params`."""
        return {
            "file": self.stored.where,
            "elements": self.stored.elements,
            "bytes": self.stored.bytes,
            "by_dtype": _sums(self.stored.by_dtype()),
            "by_group": _sums(self.stored.by_group()),
            "difference": self.difference,
            "reasons": list(self.reasons),
            "components": self.stored.breakdown().components(),
        }


def _sums(sums: Mapping[str, Sum]) -> dict[str, dict[str, int]]:
    return {name: total._asdict() for name, total in sums.items()}


@dataclass(frozen=True, slots=True)
class AnswerWithStored:
    """The parameters of the class, and what the checkpoint stores against them."""

    answer: ParameterAnswer
    comparison: Comparison

    @property
    def breakdown(self) -> Breakdown:
        return self.answer.breakdown

    def as_json(self) -> dict[str, Any]:
        """The keys of `params`, and `stored`."""
        data = self.answer.as_json()
        return {**data, "stored": self.comparison.as_json(), "notes": [*data["notes"], *self.comparison.stored.notes]}


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """What a file stores, where nothing says what class it belongs to: its elements are not always parameters."""

    name: str
    comparison: Comparison
    problem: str

    @property
    def breakdown(self) -> Breakdown:
        return self.comparison.stored.breakdown("parameters")

    def as_json(self) -> dict[str, Any]:
        """The keys of `params`; None where only the model's class could tell."""
        stored = self.comparison.stored
        embedding = stored.by_group().get("embedding", Sum(0, 0)).elements
        note = f"counted from the stored tensors alone: {self.problem}"
        return {
            "model": self.name,
            "architecture": None,
            "total": stored.elements,
            "active": None,
            "embedding": embedding,
            "trainable": None,
            "components": self.breakdown.components(),
            "stored": self.comparison.as_json(),
            "assumptions": [],
            "notes": [note, *stored.notes],
        }


@dataclass(frozen=True, slots=True)
class HubTotal:
    """What a Hub page states, against the parameters of the class. `difference` is stated minus exact, each reason with its share."""

    stated: int
    difference: int
    reasons: tuple[str, ...]
    source: str


def hub_total(answer: ParameterAnswer) -> HubTotal | None:
    """What the Hub page of a model of the catalogue states, and why it is another number; None where that is not known."""
    entry = catalogue().get(answer.spec.name)
    if entry is None or entry.hub_total is None:
        return None
    difference = entry.hub_total - answer.total
    outside = answer.not_in_total if difference else {}
    reasons = [
        f"{amount:+,}: {name} layers, which the checkpoint holds and the class does not build"
        for name, amount in outside.items()
    ]
    rest = difference - sum(outside.values())
    if rest:
        reasons.append(f"{rest:+,}: {entry.note or 'not explained'}")
    return HubTotal(entry.hub_total, difference, tuple(reasons), entry.hub_total_source)


def stored_parameters(model: str, plan: ParametersPlan) -> ParameterAnswer | AnswerWithStored | StoredAnswer:
    """The parameters of MODEL, with what its checkpoint stores where MODEL has one.

    A file of weights whose class is not known is answered from its tensors alone. InputError otherwise.
    """
    if model in catalogue():
        return parameters(load(model), plan)
    found = look(model, stored=True)
    try:
        spec = found.spec()
    except InputError as error:
        if not found.weights_named or found.stored is None:
            raise
        return StoredAnswer(found.name, Comparison(found.stored, None, _kinds(found.stored)), str(error))
    answer = parameters(spec, plan)
    if found.stored is None:
        return answer
    return AnswerWithStored(answer, compared(found.stored, answer, found.needed_config()))


def _kinds(stored: StoredTensors) -> tuple[str, ...]:
    """What of the stored elements is no plain weight."""
    sums = stored.by_role()
    return tuple(f"{sums[role].elements:,} elements are {text}" for role, text in _ROLES.items() if role in sums)


_ROLES = {
    "buffer": "buffers, which a checkpoint may hold and a class does not count as parameters",
    "scale": "scales and tables of a quantised format",
    "packed": "containers, each of several weights",
}


def compared(stored: StoredTensors, answer: ParameterAnswer, config: Mapping[str, Any]) -> Comparison:
    """The stored elements against the exact count, each reason with its number; what none explains is said too."""
    spec, difference = answer.spec, stored.elements - answer.total
    shares = _shares(stored, spec, _container_values(config))
    reasons = [f"{amount:+,}: {text}" for text, amount in shares.items() if amount]
    rest = difference - sum(shares.values())
    if rest:
        reasons.append(
            f"{rest:+,}: not explained; the file may be one shard, an adapter, or another version of the class"
        )
    return Comparison(stored, difference, tuple(reasons))


def _shares(stored: StoredTensors, spec: ModelSpec, values: Mapping[str, int]) -> dict[str, int]:
    """Elements by the reason why they are stored and not counted, or the other way round."""
    shares: dict[str, int] = defaultdict(int)
    head = 0
    for tensor in stored.tensors:
        role, group = role_of(tensor), group_of(tensor.name)
        head += tensor.elements if group == "head" else 0
        reason = _reason(tensor, role, group, spec)
        if reason:
            shares[reason] += tensor.elements
        elif role == "packed":
            shares["containers, each of several weights of the class"] -= (values[tensor.dtype] - 1) * tensor.elements
    if spec.head and not head:
        missing = sum(weight.parameters for weight in spec.head)
        shares["the class has a head of its own and the checkpoint stores none"] -= missing
    return shares


def _reason(tensor: StoredTensor, role: str, group: str, spec: ModelSpec) -> str:
    """Why a stored tensor is no parameter of the class; "" when it is one."""
    layer, has_towers = layer_of(tensor.name), any(tower.in_total for tower in spec.towers)
    if role in ("buffer", "scale"):
        return _ROLES[role]
    if group == "towers" and not has_towers:
        return "towers for pictures or sound, which the class does not build"
    if layer is not None and layer >= spec.num_hidden_layers and not has_towers:
        return f"layers beyond the class's {spec.num_hidden_layers}: multi-token prediction"
    if group == "head" and spec.tied:
        return "the head, stored although it is tied to the embedding: the class counts it once"
    return ""


def _container_values(config: Mapping[str, Any]) -> dict[str, int]:
    """Weights in one element of each container format, from the config's bits (4 where it does not say)."""
    quantization = config.get("quantization_config")
    bits = quantization.get("bits", 4) if isinstance(quantization, dict) else 4
    return {name: count * 4 // bits if bits in (2, 4, 8) else count for name, count in _VALUES.items()}
