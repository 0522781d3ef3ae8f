"""What ZeRO-3 and FSDP2 hold beside the shards: weights gathered for use, and gradients on their way to their shards."""

from __future__ import annotations

from dataclasses import dataclass

from calc.breakdown import Component, Formula
from calc.model.spec import ModelSpec
from calc.training.plan import TrainingPlan
from calc.training.recipes import RECIPES
from calc.training.stages import Stage
from calc.training.tensors import ModelTensors

_SOURCE = "PyTorch 2.13, torch/distributed/fsdp/_fully_shard: one group a layer, and a root group of embedding, final norm and head"
_URL = "https://docs.pytorch.org/docs/2.13/distributed.fsdp.fully_shard.html"


@dataclass(frozen=True, slots=True)
class Gathered:
    """Leaves by when they are alive: `kept` from forward to backward, `one` at the ends of the stack, `used` while layers run
    and `reducing` besides in their backward."""

    kept: tuple[Component, ...] = ()
    one: tuple[Component, ...] = ()
    used: tuple[Component, ...] = ()
    reducing: tuple[Component, ...] = ()
    again: bool = True  # backward gathers again what forward gave up

    @property
    def kept_bytes(self) -> int:
        return int(sum(leaf.total for leaf in self.kept))

    def leaves(self, phase: str, inside: bool) -> tuple[Component, ...]:
        """What is alive in the phase while a layer runs (`inside`) or an end of the stack."""
        if phase == "backward" and not self.again:
            return (*self.kept, *(self.reducing if inside else ()))
        if not inside:
            return (*self.kept, *self.one)
        return (*self.kept, *self.used, *(self.reducing if phase == "backward" else ()))

    def bytes(self, phase: str, inside: bool) -> int:
        return int(sum(leaf.total for leaf in self.leaves(phase, inside)))


def gathered(plan: TrainingPlan, spec: ModelSpec, stage: Stage, tensors: ModelTensors) -> Gathered:
    """Nothing below ZeRO-3 or on one rank; else the root group, two layers while layers run (one in use, one prefetched), one
    at the ends, all where none is resharded, and one layer's gradients in the buffer of their reduce-scatter."""
    if plan.zero < 3 or plan.shards == 1:
        return Gathered()
    recipe = RECIPES[plan.recipe]
    size = recipe.compute if recipe.gathered else recipe.weight
    held = [tensors.kinds[kind].elements for kind in stage.layers]
    largest = max(held, default=0)
    root = (tensors.embedding.elements if stage.first else 0) + (tensors.end.elements if stage.last else 0)
    kept = [_leaf("root", size, root)]
    if not plan.reshard_after_forward:
        kept.append(_leaf("layers", size, sum(held)))
    one = (_leaf("last_layer", size, largest),)
    used = (_leaf("running_layers", size, largest, min(2, len(held))),) if plan.reshard_after_forward else one
    reduced = 4 if recipe.gathered else size
    return Gathered(
        tuple(leaf for leaf in kept if leaf.total),
        one if largest else (),
        used if largest else (),
        (_leaf("reduce_scatter", reduced, largest),) if largest and plan.method == "full" else (),
        again=plan.reshard_after_forward,
    )


def _leaf(name: str, size: int, elements: int, copies: int = 1) -> Component:
    latex = rf"{size} \cdot <N>" if copies == 1 else rf"{copies} \cdot {size} \cdot <N>"
    assumes = ("N: parameters of the group, unsharded",)
    formula = Formula(latex, _SOURCE, _URL, assumes)
    return Component(name, copies * size * elements, formula=formula, numbers={"N": elements})
