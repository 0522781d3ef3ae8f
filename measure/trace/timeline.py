"""From the recorded events to bytes over time: categories, extension to the whole stack, and the highest points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from measure.trace.model import Stack
from measure.trace.recorder import Event, Site, Storage

STATES = ("parameters", "gradients", "optimizer")


class Key(NamedTuple):
    """What live bytes are counted under: what they are, and where they belong.

    `path` names what saves an activation, or else what made it; `made_by` what made it in any case, in which phase of the step
    (what backward computes again counts as forward's).
    """

    category: str
    path: str
    made_by: str
    phase: str


class Unextendable(Exception):
    """The recorded layers do not repeat in a way that the whole can be laid together from them."""


class Delta(NamedTuple):
    """A change of the live bytes under one key, in one phase."""

    key: Key
    nbytes: int
    phase: str


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest point of a phase: bytes, and what was alive, by category and path."""

    nbytes: int
    alive: Mapping[Key, int]


def path_of(site: Site, op: str) -> str:
    """Where a storage belongs: `layers/self_attn.q_proj/mm` inside the stack, `lm_head/mm` outside."""
    parts = ["layers"] if site.layer is not None else []
    return "/".join([*parts, *filter(None, (site.module, op))])


def shares(storage: Storage) -> Iterator[tuple[Key, int]]:
    """The keys that a storage counts under, with its bytes: what saves it names an activation, what makes it all others.

    The allocator's rounding of a state is a part of its own, as in a prediction.
    """
    category, made_by = storage.category or "temporaries", path_of(storage.site, storage.op)
    saved = storage.saved_by if storage.category in ("activations", "") else None
    path = path_of(saved.site, saved.op) if saved else made_by
    rounding = storage.nbytes - storage.exact if category in STATES else 0
    phase = "forward" if storage.again else storage.site.phase.partition(" ")[0]
    yield Key(category, path, made_by, phase), storage.nbytes - rounding
    if rounding:
        yield Key(category, "rounding", "rounding", ""), rounding


def extend(events: Sequence[Event], stack: Stack) -> list[Delta]:
    """The changes of the whole model's step, from those of the layers that were run: each stands for its like.

    Raises Unextendable when a layer's events do not come in one piece in each phase.
    """
    runs = [(site, list(group)) for site, group in groupby(events, lambda event: (event.site.phase, event.site.layer))]
    blocks = _blocks(runs)
    by_place = {place: block for place, block in blocks if place[1] is not None}
    deltas: list[Delta] = []
    for (phase, layer), block in blocks:
        if layer is None:
            deltas += _outside(block, Counter(stack.stands_for))
            continue
        forward = phase.startswith("forward")
        for index in (layer, *_followers(layer, stack, forward)):
            standing = stack.stands_for[index]
            alike = [other for other, known in enumerate(stack.stands_for) if known == standing]
            last = index == (max(alike) if forward else min(alike))
            deltas += _inside(by_place[phase, standing], last)
    return deltas


def _followers(layer: int, stack: Stack, forward: bool) -> Iterable[int]:
    """The layers that were not run and come next after this one, in the phase's direction."""
    ran = set(stack.run)
    ahead = range(layer + 1, len(stack.kinds)) if forward else range(layer - 1, -1, -1)
    for index in ahead:
        if index in ran:
            return
        yield index


def _blocks(
    runs: Sequence[tuple[tuple[str, int | None], list[Event]]],
) -> list[tuple[tuple[str, int | None], list[Event]]]:
    """Runs joined so that each layer has one block in each phase; what lies between two runs of a layer joins it."""
    blocks: list[tuple[tuple[str, int | None], list[Event]]] = []
    for place, events in runs:
        at = next((index for index, (known, _) in enumerate(blocks) if known == place and place[1] is not None), None)
        if at is None:
            blocks.append((place, events))
            continue
        between = blocks[at + 1 :]
        if any(layer is not None for (_, layer), _ in between):
            raise Unextendable(f"layer {place[1]} comes back in {place[0]}")
        joined = blocks[at][1] + [event for _, group in between for event in group] + events
        blocks[at:] = [(place, joined)]
    return blocks


def _outside(events: Iterable[Event], counts: Mapping[int, int]) -> Iterator[Delta]:
    """What happens outside the layers; to a layer's storage it happens in all the layers that it stands for."""
    for storage, sign, site in events:
        if storage.category != "host":
            count = 1 if storage.site.layer is None else counts[storage.site.layer]
            for key, nbytes in shares(storage):
                yield Delta(key, sign * nbytes * count, site.phase)


def _inside(events: Iterable[Event], last: bool) -> Iterator[Delta]:
    """What happens in one layer. What was made outside, once for all, is released by the last of the layers that do."""
    for storage, sign, site in events:
        if storage.category != "host" and (last or sign > 0 or storage.site.layer is not None):
            for key, nbytes in shares(storage):
                yield Delta(key, sign * nbytes, site.phase)


def states(storages: Iterable[Storage], stack: Stack) -> Counter[Key]:
    """The bytes of storages alive at one moment, by key: what a layer holds is held by each that it stands for."""
    counts = Counter(stack.stands_for)
    held: Counter[Key] = Counter()
    for storage in storages:
        if storage.category != "host":
            count = 1 if storage.site.layer is None else counts[storage.site.layer]
            for key, nbytes in shares(storage):
                held[key] += nbytes * count
    return held


def peaks(baseline: Mapping[Key, int], deltas: Sequence[Delta]) -> dict[str, Peak]:
    """The highest point of each phase, by its name. The state before the first change counts for the first phase."""
    total = sum(baseline.values())
    highest: dict[str, tuple[int, int]] = {}
    for index, delta in enumerate(deltas):
        before = total
        total += delta.nbytes
        if delta.phase not in highest:  # a phase starts with what the one before it left
            highest[delta.phase] = (before, index)
        if total > highest[delta.phase][0]:
            highest[delta.phase] = (total, index + 1)
    return {phase: Peak(nbytes, _alive(baseline, deltas[:end])) for phase, (nbytes, end) in highest.items()}


def _alive(baseline: Mapping[Key, int], deltas: Iterable[Delta]) -> dict[Key, int]:
    alive = Counter(baseline)
    for delta in deltas:
        alive[delta.key] += delta.nbytes
    return {key: nbytes for key, nbytes in alive.items() if nbytes}
