"""What would make a training step fit: the smallest changes of the plan that do, each with what it saves and costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any, Final, NamedTuple

from calc.commands import flag, word
from calc.errors import InputError
from calc.hardware import Gpu
from calc.model.spec import ModelSpec
from calc.training.advice.costs import Cost, cost
from calc.training.advice.largest import changed, divisors, needed, sequence_unit, with_own_share
from calc.training.answer import TrainingAnswer, train
from calc.training.plan import TrainingPlan

_PAIRS = 6  # shown at most
_ROUNDS = 3  # of a search, each with the share of fragmentation that the last one's finds showed
_SAME_TRAINING = (
    "optimizer_kernel",
    "loss",
    "zero",
    "micro_batch",
    "recompute",
    "offload",
)  # fields that leave the result as it is
_OTHER_TRAINING = {"optimizer", "recipe", "method", "seq"}

Values = dict[str, object]


class Move(NamedTuple):
    """One way to need less: values of a field from the mildest to the hardest, with what else must be set.

    `said` names the change, with the field's value. `falls`: the need falls from each value to the next, so that halving finds the
    first that fits. `adds`: it takes more GPUs. `ranks`: the field's ranks come out of so many that it shares with data parallelism.
    """

    field: str
    said: str
    values: Sequence[object]
    also: Values
    falls: bool = False
    adds: bool = False
    ranks: int = 0

    def at(self, value: object) -> Values:
        """The plan's new values."""
        left = {"dp": self.ranks // value if isinstance(value, int) else None} if self.ranks else {}
        return {**self.also, **left, self.field: value}

    def name(self, values: Values) -> str:
        value = values[self.field]
        return self.said.format(_WRITTEN.get(value, value))


@dataclass(frozen=True, slots=True)
class Change:
    """A change that makes the step fit. Bytes are those of one GPU, as the driver shows them."""

    name: str
    values: Values  # of the plan's fields
    plan: TrainingPlan
    driver_bytes: int
    saved_bytes: int
    costs: tuple[Cost, ...]
    adds_gpus: bool = False

    @property
    def same_training(self) -> bool:
        """Whether what is trained, and how it is rounded, stays as it is."""
        return not _OTHER_TRAINING & set(self.values)

    @property
    def flags(self) -> str:
        """The change as the command line writes it."""
        return " ".join(f"{flag(name)} {word(value)}" for name, value in self.values.items())

    def as_json(self) -> dict[str, Any]:
        return {
            "change": self.name,
            "flags": self.flags,
            "values": self.values,
            "driver_bytes": self.driver_bytes,
            "saved_bytes": self.saved_bytes,
            "gpus": self.plan.gpus,
            "costs": [each.as_json() for each in self.costs],
        }


_WRITTEN: Final[dict[object, str]] = {  # as people write them
    "lora": "LoRA",
    "qlora": "QLoRA",
    "pure-bf16": "bf16 alone",
    "adamw-8bit": "AdamW with 8-bit states",
    "adamw-4bit": "AdamW with 4-bit states",
    "adafactor": "Adafactor",
    "sgd": "SGD",
}
_SMALLER: Final = {  # optimizers that keep less, the nearest first
    "adamw": ("adamw-8bit", "adafactor", "sgd"),
    "paged-adamw": ("adamw-8bit", "adafactor", "sgd"),
    "adamw-8bit": ("adafactor", "sgd"),
    "adamw-4bit": ("adafactor", "sgd"),
    "muon": ("adafactor", "sgd"),
    "lion": ("adafactor", "sgd"),
    "momentum": ("adafactor", "sgd"),
    "adafactor": ("sgd",),
    "sgd": (),
}
_LOSSES: Final = {
    "full": ("fused", "chunked-output", "chunked"),
    "chunked-output": ("chunked",),
    "chunked": ("fused",),
    "fused": (),
}
_MOST_TP = 8  # GPUs of one node, which tensor parallelism should not leave (Megatron-LM, arXiv 2104.04473, section 3.2)
_MOST_DP = 4096
_SHORTEST = 8  # a sequence is cut to an eighth at most: what is left would be another task


def _moves(plan: TrainingPlan, spec: ModelSpec) -> Iterator[Move]:
    """The moves that the plan leaves, the least painful first. Those that its rules refuse drop out when they are tried."""
    if plan.optimizer == "adamw" and plan.optimizer_kernel != "fused":
        yield Move("optimizer_kernel", "the {} optimizer kernel", ("fused",), {})
    yield Move("loss", "the {} loss", _LOSSES[plan.head_loss], {})
    if plan.shards > 1:
        ranks = f"ZeRO-{{}} over the {plan.shards:,} ranks there are"
        yield Move("zero", ranks, range(plan.zero + 1, 4), {})
    smaller = [value for value in divisors(plan.batch // plan.dp) if value < plan.micro_batch]
    yield Move(
        "micro_batch", "micro-batch {}, gradients accumulated", smaller[::-1], {"global_batch": plan.batch}, True
    )
    levels = ("none", "full") if plan.transformers else ("none", "selective", "full")
    yield Move("recompute", "activation checkpointing: {}", levels[levels.index(plan.recompute) + 1 :], {}, True)
    if plan.offload == "none" and (plan.shards == 1 or plan.zero >= 2):
        yield Move("offload", "{} offloaded to the host", ("optimizer",), {})
    if plan.dp > plan.dp_replicate == 1:
        both = plan.tp * plan.dp
        within = [value for value in _doubled(plan.tp, _MOST_TP) if both % value == 0]
        said = "tensor parallelism over {} of the same GPUs"
        yield Move("tp", said, within, {"global_batch": plan.batch}, ranks=both)
    yield Move("optimizer", "optimizer {}", _SMALLER[plan.optimizer], {}, True)
    if plan.recipe != "pure-bf16":
        yield Move("recipe", "precision {}", ("pure-bf16",), {})
    if plan.method == "full":
        yield Move("method", f"{{}} of rank {plan.lora_rank}", ("lora", "qlora"), {})
    unit = sequence_unit(plan)
    yield Move("seq", "sequence {:,}", range(plan.seq - unit, max(unit, plan.seq // _SHORTEST) - 1, -unit), {}, True)
    yield Move("tp", "tensor parallelism over {}", _doubled(plan.tp, _MOST_TP), {}, adds=True)
    yield Move("dp", "FSDP (ZeRO-3) over {:,} ranks", _doubled(plan.dp, _MOST_DP), {"zero": 3}, adds=True)
    deepest = spec.num_hidden_layers // plan.virtual_stages
    yield Move("pp", "{} pipeline stages", _doubled(plan.pp, deepest), {}, adds=True)


def _doubled(now: int, most: int) -> list[int]:
    return [now << place for place in range(1, 13) if now << place <= most]


Found = tuple[tuple[Move, ...], Values]


def _joined(taken: Sequence[tuple[Move, Values]]) -> Values:
    return {name: value for _, values in taken for name, value in values.items()}


class _Search:
    """Tries plans against one GPU, each once."""

    def __init__(self, spec: ModelSpec, plan: TrainingPlan, gpu: Gpu | None, limit: int, given: float | None) -> None:
        self.given = given  # the user's own share of fragmentation
        self.spec, self.plan, self.gpu, self.limit = spec, plan, gpu, limit
        self.tried: dict[tuple[tuple[str, object], ...], int | None] = {}

    def fits(self, values: Values) -> bool:
        found = self._needed(values)
        return found is not None and found <= self.limit

    def _needed(self, values: Values) -> int | None:
        key = tuple(sorted(values.items()))
        if key not in self.tried:
            self.tried[key] = needed(self.spec, self.plan, values, self.gpu)
        return self.tried[key]

    def _less(self, values: Values, before: Values) -> bool:
        """Whether a change needs less than what it starts from."""
        after, now = self._needed(values), self._needed(before)
        return after is not None and (now is None or after < now)

    def mildest(self, move: Move, others: Values) -> Values | None:
        """The mildest values of the move that fit with others, all together; None when none does."""
        values = move.values
        if not move.falls:
            return next((found for value in values if self.fits(found := {**others, **move.at(value)})), None)
        if not values or not self.fits({**others, **move.at(values[-1])}):
            return None
        low, high = 0, len(values) - 1
        while low < high:
            middle = (low + high) // 2
            if self.fits({**others, **move.at(values[middle])}):
                high = middle
            else:
                low = middle + 1
        return {**others, **move.at(values[low])}

    def hardest(self, move: Move, others: Values) -> Values | None:
        """The values of the move that need least with others; None when none is allowed."""
        values = move.values[-1:] if move.falls else move.values
        asked = ((self._needed({**others, **move.at(value)}), value) for value in values)
        allowed = [(needs, index, value) for index, (needs, value) in enumerate(asked) if needs is not None]
        return move.at(min(allowed)[2]) if allowed else None

    def singles(self, moves: Sequence[Move]) -> Iterator[Found]:
        """Each move that is enough by itself."""
        found = (((move,), self.mildest(move, {})) for move in moves)
        return ((each, values) for each, values in found if values)

    def pairs(self, moves: Sequence[Move]) -> Iterator[Found]:
        """The pairs that are enough, the least painful first."""
        ranked = sorted(combinations(range(len(moves)), 2), key=lambda pair: (sum(pair), pair))
        found = (((moves[one], moves[other]), self.pair(moves[one], moves[other])) for one, other in ranked)
        return ((each, values) for each, values in found if values)

    def combined(self, moves: Sequence[Move]) -> Iterator[Found]:
        """One combination of which none can be left out: moves at their hardest until all fits, then the last dropped or
        made mild first."""
        taken: list[tuple[Move, Values]] = []
        for move in moves:
            before = _joined(taken)
            values = self.hardest(move, before)
            if values and not self._less({**before, **values}, before):
                continue  # more ranks can need more: FSDP2 pads eight experts to as many as there are
            taken += [(move, values)] if values else []
            if values and self.fits(_joined(taken)):
                break
        else:
            return
        for move, values in reversed(taken[:]):
            at = taken.index((move, values))
            others = _joined(taken[:at] + taken[at + 1 :])
            if self.fits(others):
                del taken[at]
            else:
                mild = self.mildest(move, others) or values
                taken[at] = (move, {name: mild[name] for name in values})
        yield tuple(move for move, _ in taken), _joined(taken)

    def pair(self, one: Move, other: Move) -> Values | None:
        """The mildest values of two moves that fit together: the other at its hardest, one at its mildest, then the other."""
        for value in reversed(other.values):
            found = self.mildest(one, other.at(value))
            if found is not None:
                return self.mildest(other, {name: found[name] for name in one.at(None)})
            if other.falls:
                return None
        return None

    def _alone(self, move: Move, values: Values) -> TrainingPlan:
        """The plan with this move of a combination; with all of it where the move is not allowed by itself."""
        try:
            return changed(self.plan, {name: values[name] for name in move.at(None)})
        except InputError:
            return changed(self.plan, values)

    def change(self, moves: Sequence[Move], values: Values, before: int) -> Change:
        plan = changed(self.plan, {**values, "fragmentation_percent": self.given})
        needs = train(self.spec, plan, self.gpu).driver_bytes
        alone = [self._alone(move, values) for move in moves]
        costs = tuple(cost(move.field, self.plan, after, self.spec) for move, after in zip(moves, alone, strict=True))
        name = " + ".join(move.name(values) for move in moves)
        return Change(name, values, plan, needs, before - needs, costs, any(move.adds for move in moves))


def changes_that_fit(spec: ModelSpec, plan: TrainingPlan, gpu: Gpu | None) -> tuple[Change, ...]:
    """The smallest changes with which a step that does not fit does; () when it fits, or the GPU's memory is unknown.

    On the same GPUs: each single change at the mildest value that fits, the least painful first; the least painful pairs where
    no single one is enough; one combination where no pair is. Where no single change fits on the same ones, also what fits on more
    GPUs, alone or with changes that leave the training as it is. InputError when plan and model do not go together.
    """
    before = train(spec, plan, gpu).driver_bytes
    limit = gpu.memory_bytes if gpu else None
    if gpu is None or limit is None or before <= limit:
        return ()
    given, plan = plan.fragmentation_percent, with_own_share(spec, plan, gpu)
    for _ in range(_ROUNDS):
        search = _Search(spec, plan, gpu, limit, given)
        changes = [search.change(each, values, before) for each, values in _found(search, plan, spec)]
        fitting = tuple(change for change in changes if change.driver_bytes <= limit)
        if fitting or not changes:
            return fitting
        shares = [with_own_share(spec, change.plan, gpu).fragmentation_percent or 0 for change in changes]
        plan = changed(
            plan, {"fragmentation_percent": max(shares)}
        )  # their allocations leave more idle than the plan's own
    return ()


def single_changes(answer: TrainingAnswer) -> tuple[Change, ...]:
    """Each change on the same GPUs that needs less by itself, at its mildest value, the least painful first; whether it fits or not."""
    spec, plan, gpu, before = answer.spec, answer.plan, answer.gpu, answer.driver_bytes
    search = _Search(spec, plan, gpu, before, plan.fragmentation_percent)
    found = []
    for move in _moves(plan, spec):
        if move.adds or move.field == "seq" or not move.values:
            continue
        with suppress(InputError):  # what the plan's rules refuse is no change
            found.append(search.change((move,), move.at(move.values[0]), before))
    return tuple(change for change in found if change.saved_bytes > 0)


def _found(search: _Search, plan: TrainingPlan, spec: ModelSpec) -> list[Found]:
    """What the search finds: on the same GPUs, and on more where no single change does on these."""
    moves = list(_moves(plan, spec))
    here, more = ([move for move in moves if move.adds is adds] for adds in (False, True))
    found = list(search.singles(here))
    if found:
        return found
    same = [move for move in here if move.field in _SAME_TRAINING]
    found = list(islice(search.pairs(here), _PAIRS)) or list(search.combined(here))
    for move in more:
        joined = list(search.singles([move])) or list(search.combined([*same, move]))
        found += [each for each in joined if move in each[0]]  # the others alone may do
    return found or list(search.combined([*same, *more])) or list(search.combined([*more, *here]))
