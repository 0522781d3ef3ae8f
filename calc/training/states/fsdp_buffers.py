"""What ZeRO-3 and FSDP2 hold besides the shards: weights gathered for use, and gradients on their way to their shards.

FSDP2 gathers a group at a time: each layer is one, and the embedding, the final norm and the head are the root's. A gather fills one
flat buffer, which is then copied out to whole parameters. In forward the buffer of a group lives until the next is copied out; in
backward the next layer's buffer is filled while this one runs. A layer's gradients are copied into the buffer of their
reduce-scatter, which lives until the next layer's is needed; those of the root wait for the end of backward.

With expert parallelism torchtitan shards a layer's experts as a group of their own, over other ranks, and names what each layer gathers
ahead: the next layer and its experts (set_modules_to_forward_prefetch, set_modules_to_backward_prefetch).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import ClassVar, NamedTuple

from calc.breakdown import Component, Formula, Number
from calc.model.spec import ModelSpec
from calc.training.pipeline_stages import Stage
from calc.training.plan import TrainingPlan
from calc.training.states.recipes import RECIPES
from calc.training.states.sharding import StateKey
from calc.training.states.tensors import ModelTensors, Tensors
from calc.units import ceil_div, round_up

_SOURCE = "PyTorch 2.13, torch/distributed/fsdp/_fully_shard (_fsdp_param_group.py, _fsdp_collectives.py)"
_URL = "https://docs.pytorch.org/docs/2.13/distributed.fsdp.fully_shard.html"
_ASSUMES = (
    "N: parameters, padded to whole rows on each rank; r: what the allocator's rounding and wider tensors add",
    "one group a layer, and one of embedding, final norm and head",
)


class Amount(NamedTuple):
    """Bytes on this device, and the parameters that they stand for."""

    bytes: int
    elements: int

    def __add__(self, other: Amount) -> Amount:  # type: ignore[override]
        return Amount(self.bytes + other.bytes, self.elements + other.elements)


NOTHING = Amount(0, 0)


class Group(NamedTuple):
    """Parameters that are gathered together.

    `whole`: the parameters, unsharded. `flat`: the buffer of their all-gather. `cast`: this rank's shards in the format that is
    gathered, where they have another. `gradients`: unsharded, of what trains; `reduced`: the buffer of their reduce-scatter.
    """

    whole: Amount = NOTHING
    flat: Amount = NOTHING
    cast: Amount = NOTHING
    gradients: Amount = NOTHING
    reduced: Amount = NOTHING
    storages: tuple[int, ...] = ()  # bytes of each whole parameter


_NONE = Group()


@dataclass(frozen=True, eq=False)
class FsdpBuffers:
    """The groups of one stage: the root's, that of its end alone, and the layers' in order; `first`: segments before the layers.

    `apart`: both ends are groups of their own, in order among the layers, and the last stays whole from its forward on, over
    the loss, which lies behind it (torchtitan). `keeps`: forward leaves the layers' weights whole. `size` and `reduced` are
    bytes of a gathered weight and of a reduced gradient. `experts`: next to each layer the group of its experts, where they have one.
    """

    root: Group = _NONE
    end: Group = _NONE
    layers: tuple[Group, ...] = ()
    first: int = 0
    keeps: bool = False
    apart: bool = False
    size: int = 2
    reduced: int = 2
    experts: tuple[Group, ...] = ()

    holds_gradients: ClassVar[bool] = False  # whether gradients of earlier micro-batches wait here, unsharded

    @cached_property
    def _known(self) -> dict[tuple[str, int, str], tuple[int, int]]:
        return {}

    @cached_property
    def _whole(self) -> tuple[Amount, ...]:
        """The whole weights of the layers before each, and of all."""
        sums = [NOTHING]
        for layer, group in enumerate(self.layers):
            sums.append(sums[-1] + group.whole + self.experts_of(layer).whole)
        return tuple(sums)

    def experts_of(self, layer: int) -> Group:
        """The group of a layer's experts."""
        return self.experts[layer] if 0 <= layer < len(self.experts) else _NONE

    def ahead(self, layer: int) -> Amount:
        """The buffers into which a layer and its experts are gathered before their turn."""
        if not 0 <= layer < len(self.layers):
            return NOTHING
        return self.layers[layer].flat + self.experts_of(layer).flat

    @property
    def active(self) -> bool:
        return bool(self.root.whole.bytes or self.layers)

    @property
    def waits(self) -> bool:
        """Whether the gradients of both ends stay whole to the end of backward, as the root's do."""
        return self.active and not self.apart

    @property
    def kept_bytes(self) -> int:
        """What stays from forward to backward."""
        if self.apart and not self.keeps:
            return self.layers[-1].whole.bytes
        return self.root.whole.bytes + (self._whole[-1].bytes if self.keeps else 0)

    def sizes(self, phase: str, index: int, at: str = "block") -> tuple[int, int]:
        """Bytes alive while segment `index` runs ("block"), as it begins ("before") or as its gradients are reduced ("after"), and
        those of them that the gathers' stream has allocated."""
        if not self.active:
            return 0, 0
        case = (phase, index, at)
        if case not in self._known:
            amounts = list(self._live_amounts(phase, index, at))
            buffers = sum(amount.bytes for name, amount in amounts if name in ("all_gather", "cast"))
            self._known[case] = sum(amount.bytes for _, amount in amounts), buffers
        return self._known[case]

    @cached_property
    def pool(self) -> int:
        """What the stream of the gathers comes to hold of the allocator: two buffers that follow each other."""
        if self.experts:
            return max(self.ahead(layer).bytes + self.ahead(layer + 1).bytes for layer in range(len(self.layers)))
        sizes = [group.flat.bytes for group in (self.layers if self.apart else (self.root, *self.layers))]
        return max((a + b for a, b in pairwise(sizes)), default=sum(sizes))

    def leaves(self, phase: str, index: int, at: str) -> tuple[Component, ...]:
        """The same as leaves."""
        named: dict[str, Amount] = {}
        for name, amount in self._live_amounts(phase, index, at) if self.active else ():
            named[name] = named.get(name, NOTHING) + amount
        return tuple(self._leaf(name, amount) for name, amount in named.items() if amount.bytes)

    def _live_amounts(self, phase: str, index: int, at: str) -> Iterator[tuple[str, Amount]]:
        layer = min(index - self.first, len(self.layers))
        return (self._in_forward if phase == "forward" else self._in_backward)(layer, index, at)

    def _group(self, layer: int) -> Group:
        """A layer's group; before the first, and without layers, the root's."""
        return self.layers[min(layer, len(self.layers) - 1)] if layer >= 0 and self.layers else self.root

    def _in_forward(self, layer: int, index: int, at: str) -> Iterator[tuple[str, Amount]]:
        inside = 0 <= layer < len(self.layers)
        yield "root", self.root.whole
        if self.keeps:
            yield "layers", self._whole[max(layer, 0)]
        if self.apart and not inside:  # the model's forward has ended, and its last buffer gone
            yield "layers", self.layers[-1].whole if not self.keeps else NOTHING
            return
        if self.experts:  # counted to the layer's end, though its last operators run without them
            own = self.experts_of(layer)
            yield "layers", NOTHING if self.keeps else self.layers[layer].whole + own.whole
            yield "all_gather", (own if own.whole.bytes else self.layers[layer]).flat
            yield "all_gather", self.ahead(layer + 1)
            return
        yield "all_gather", self._group(layer).flat
        if inside:
            yield "layers", self.layers[layer].whole
        if inside and at == "before":  # the buffer of the group before goes only when this one is copied out
            yield "all_gather", self._group(layer - 1).flat

    def _in_backward(self, layer: int, index: int, at: str) -> Iterator[tuple[str, Amount]]:
        last = len(self.layers)
        inside = 0 <= layer < last
        if index == 0 and self.first and at == "after":  # the root's turn, when all else has ended
            yield "root_gradients", self.root.gradients
            yield "reduce_scatter", self.root.reduced
            return
        if self.apart and layer == last:  # the loss: nothing of the model has begun
            yield "layers", self._whole[-1] if self.keeps else self.layers[-1].whole
            return
        yield "root", self.root.whole
        if layer < last:
            yield "root_gradients", self.end.gradients
            yield "reduce_scatter", self._reducing(layer, at)
        if self.keeps:
            yield "layers", self._whole[min(max(layer + (at != "after"), 0), last)]
        else:
            if inside and at != "after":
                yield "layers", self.layers[layer].whole + self.experts_of(layer).whole
            yield from self._prefetched(layer, at)

    def _reducing(self, layer: int, at: str) -> Amount:
        """The buffer of the reduce-scatter before, or of this layer's own; that of its experts, whose turn is first, is the larger."""
        waits = layer if at == "after" else max(layer + 1, 0)
        if at == "after" and self.experts_of(layer).reduced.bytes:
            return self.experts_of(layer).reduced
        return self.layers[waits].reduced if waits < len(self.layers) else NOTHING

    def _prefetched(self, layer: int, at: str) -> Iterator[tuple[str, Amount]]:
        """The buffer of the next layer's gather; as a layer begins, its own, or the next with the cast that fills it."""
        if self.experts:
            yield "all_gather", self.ahead(layer - 1)
            return
        if layer <= 0:
            own = self._group(0).flat if layer == 0 and at == "before" and self.layers else NOTHING
            yield "all_gather", own
            return
        following = self.layers[layer - 1]
        own = self.layers[layer].flat if layer < len(self.layers) - self.apart else NOTHING
        if at == "before" and own.bytes > following.flat.bytes + following.cast.bytes:
            yield "all_gather", own
            return
        yield "all_gather", following.flat
        if at == "before":
            yield "cast", following.cast

    def _leaf(self, name: str, amount: Amount) -> Component:
        size = self.reduced if name in ("reduce_scatter", "accumulated_gradients") else self.size
        rest = amount.bytes - size * amount.elements
        numbers: dict[str, Number] = {"N": amount.elements, **({"r": rest} if rest else {})}
        latex = rf"{size} \cdot <N>" + (" + <r>" if rest else "")
        return Component(name, amount.bytes, formula=Formula(latex, _SOURCE, _URL, _ASSUMES), numbers=numbers)


@dataclass(frozen=True, eq=False)
class PipelineBuffers(FsdpBuffers):
    """A pipeline stage's, in torchtitan: weights that were gathered once stay whole to the end of the step, and so do the gradients of all
    micro-batches, unsharded and in the format of the reduction, until the last has run (torch/distributed/pipelining/stage.py,
    backward_maybe_with_nosync; FSDPParam.to_accumulated_grad_if_needed)."""

    accumulated: Amount = NOTHING
    holds_gradients: ClassVar[bool] = True

    @property
    def kept_bytes(self) -> int:
        return self._whole[-1].bytes

    def _live_amounts(self, phase: str, index: int, at: str) -> Iterator[tuple[str, Amount]]:
        yield "layers", self._whole[-1]
        yield "accumulated_gradients", self.accumulated


def fsdp_buffers(plan: TrainingPlan, spec: ModelSpec, stage: Stage, tensors: ModelTensors) -> FsdpBuffers:
    """The groups of a stage under ZeRO-3; nothing below it or on one rank."""
    if plan.zero < 3 or (plan.shards == 1 and plan.offload != "parameters"):
        return FsdpBuffers()
    recipe, key = RECIPES[plan.recipe], StateKey.of(plan)
    size = recipe.compute if recipe.gathered else recipe.weight
    reduced = 4 if recipe.gathered else size
    sizes = (size, reduced) if recipe.gathered else (0, 0)
    end = (tensors.end,) if stage.last else ()
    tied = (tensors.tied_head,) if stage.last and tensors.tied_head.tensors else ()
    towers = [tower for tower, count in tensors.towers for _ in range(count)] if stage.first else []
    root = (*((tensors.embedding, *towers) if stage.first else tied), *end)
    narrow = plan.float8_all_gather
    if plan.shards_ends_apart:
        groups = [tensors.kinds[kind] for kind in stage.layers]
        groups = [*([tensors.embedding] * stage.first), *groups, *([tensors.end] * stage.last)]
        experts: tuple[Group, ...] = ()
        if key.experts_inside:
            parts = [_experts_apart(group) for group in groups]
            groups = [rest for rest, _ in parts]
            experts = tuple(_group((own,), key, sizes) for _, own in parts)
        made = tuple(_group((group,), key, sizes, narrow) for group in groups)
        if plan.pp > 1:
            held = sum((group.gradients for group in (*made, *experts)), NOTHING)
            accumulated = Amount(held.elements * reduced, held.elements)
            return PipelineBuffers(
                layers=made, apart=True, size=size, reduced=reduced, experts=experts, accumulated=accumulated
            )
        return FsdpBuffers(
            layers=made, keeps=not plan.reshard_after_forward, apart=True, size=size, reduced=reduced, experts=experts
        )
    return FsdpBuffers(
        root=_group(root, key, sizes),
        end=_group((*end, *tied), key, sizes),
        layers=tuple(_group((tensors.kinds[kind],), key, sizes, narrow) for kind in stage.layers),
        first=int(stage.first),
        keeps=not plan.reshard_after_forward,
        size=size,
        reduced=reduced,
    )


@lru_cache(maxsize=1024)
def _experts_apart(group: Tensors) -> tuple[Tensors, Tensors]:
    """What a layer holds besides its experts, and these."""
    rest = tuple(tensor for tensor in group.tensors if not tensor.expert)
    return Tensors(group.path, rest), Tensors(group.path, tuple(tensor for tensor in group.tensors if tensor.expert))


@lru_cache(maxsize=1024)
def _group(found: tuple[Tensors, ...], key: StateKey, sizes: tuple[int, int], narrow: bool = False) -> Group:
    """A group's buffers. `sizes`: bytes of a gathered weight and of a reduced gradient; 0 where both are as they are stored.
    `narrow`: matrices are gathered in float8 (torchao, fsdp_pre_all_gather), and their gradients as wide as before."""
    whole: list[tuple[str, Amount]] = []
    gradients: list[tuple[str, Amount]] = []
    flat = cast = reduced = NOTHING
    for tensor in (tensor for tensors in found for tensor in tensors.tensors):
        rules = key.rules(tensor)
        weight = next(rule for rule in rules if rule.group == "parameters")
        ranks = key.ranks(tensor, weight)
        shard = key.elements(tensor, ranks)
        wide = size = sizes[0] or weight.bytes
        size = 1 if narrow and tensor.matrix else size
        if tensor.quantised:  # bytes that FSDP shards and gathers as they are
            size, shard = weight.bytes, ceil_div(shard, weight.per)
        whole.append((key.storage(tensor), Amount(size * shard * ranks, shard * ranks)))
        flat += Amount(size * shard * ranks, shard * ranks) if ranks > 1 or not tensor.expert else NOTHING
        cast += Amount(size * shard, shard) if size != weight.bytes else NOTHING
        if any(rule.group == "gradients" for rule in rules):
            gradients.append((key.storage(tensor), Amount(wide * tensor.elements, tensor.elements)))
            reduced += Amount((sizes[1] or weight.bytes) * shard * ranks, shard * ranks)
    one = "the buffer"
    sizes_of = (_rounded([(one, amount)], key.granule).bytes for amount in _stored(whole).values())
    return Group(
        _rounded(whole, key.granule),
        _rounded([(one, flat)], key.granule),
        _rounded([(one, cast)], key.granule),
        _rounded(gradients, key.granule),
        _rounded([(one, reduced)], key.granule),
        tuple(sizes_of),
    )


def _stored(amounts: Iterable[tuple[str, Amount]]) -> dict[str, Amount]:
    """Amounts by the name of their storage."""
    stored: dict[str, Amount] = {}
    for name, amount in amounts:
        stored[name] = stored.get(name, NOTHING) + amount
    return stored


def _rounded(amounts: Iterable[tuple[str, Amount]], granule: int) -> Amount:
    """The sum of storages, given with the name of each; equal names are one storage."""
    stored = _stored(amounts)
    return Amount(
        sum(round_up(amount.bytes, granule) for amount in stored.values()),
        sum(amount.elements for amount in stored.values()),
    )
