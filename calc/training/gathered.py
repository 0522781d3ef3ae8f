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
    """Leaves by when they are alive: `kept` from forward to backward, `used` while layers run, `reducing` in backward only."""

    kept: tuple[Component, ...] = ()
    used: tuple[Component, ...] = ()
    reducing: tuple[Component, ...] = ()

    @property
    def kept_bytes(self) -> int:
        return int(sum(leaf.total for leaf in self.kept))

    def leaves(self, phase: str) -> tuple[Component, ...]:
        """What is alive at the highest point of the phase."""
        return (*self.kept, *self.used, *(self.reducing if phase == "backward" else ()))

    def bytes(self, phase: str) -> int:
        return int(sum(leaf.total for leaf in self.leaves(phase)))


def gathered(plan: TrainingPlan, spec: ModelSpec, stage: Stage, tensors: ModelTensors) -> Gathered:
    """Nothing below ZeRO-3 or on one rank; else the root group, two layers (one in use, one prefetched) or all, and one
    layer's gradients in the buffer of their reduce-scatter."""
    if plan.zero < 3 or plan.shards == 1:
        return Gathered()
    recipe = RECIPES[plan.recipe]
    size = recipe.compute if recipe.gathered else recipe.weight
    held = [tensors.kinds[kind].elements for kind in stage.layers]
    largest = max(held, default=0)
    root = (tensors.embedding.elements if stage.first else 0) + (tensors.end.elements if stage.last else 0)
    kept = [_leaf("root", size, root)]
    used: list[Component] = []
    if plan.reshard_after_forward:
        used.append(_leaf("layers", size, largest, min(2, len(held))))
    else:
        kept.append(_leaf("layers", size, sum(held)))
    reduced = 4 if recipe.gathered else size
    return Gathered(
        tuple(leaf for leaf in kept if leaf.total),
        tuple(leaf for leaf in used if leaf.total),
        (_leaf("reduce_scatter", reduced, largest),) if largest and plan.method == "full" else (),
    )


def _leaf(name: str, size: int, elements: int, copies: int = 1) -> Component:
    latex = rf"{size} \cdot <N>" if copies == 1 else rf"{copies} \cdot {size} \cdot <N>"
    assumes = ("N: parameters of the group, unsharded",)
    formula = Formula(latex, _SOURCE, _URL, assumes)
    return Component(name, copies * size * elements, formula=formula, numbers={"N": elements})
