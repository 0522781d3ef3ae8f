"""A stage of the step as segments in order of execution: embedding, layers, end. Each implementation makes its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from calc.breakdown import Component
from calc.training.autograd.blocks import Block, BlockBytes, Sizes
from calc.training.states.tensors import Tensors


@dataclass(frozen=True, eq=False)
class Segment:
    """One block of the stage with its numbers, and how to show what it keeps and what is alive at its peaks.

    `kept()` are the leaves of one copy, `kept(True)` with what autocast holds too to the end of forward;
    `live_parts(phase, accumulating)` are those at the block's highest point.
    """

    path: tuple[str, ...]
    bytes: BlockBytes
    tensors: Tensors
    keeps_input: bool  # its input is among what it keeps
    kept: Callable[..., tuple[Component, ...]]
    live_parts: Callable[[str, bool], tuple[Component, ...]]
    program: tuple[Block, Sizes] | None = None  # its events; none of a ledger's segment

    @property
    def inside(self) -> bool:
        """Whether it is a layer, not an end of the stack."""
        return self.path[0] == "layers"


@dataclass(frozen=True, slots=True)
class Constant:
    """What the model or its caller keeps besides the blocks: a leaf, whether each micro-batch has its own, and how long.

    `until`: "layers" while layers still need it in backward, "step" to the end of the step; "backward": only in backward;
    "stack": only while the layers run forward; "end": only in the optimizer's step.
    """

    leaf: Component
    each: bool
    until: str
    fixed: bool = False  # of one size, whatever the batch
    late: bool = False  # made as forward ends
