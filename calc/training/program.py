"""What a program whose memory is described must say: the parts of a stage, and what an answer says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from calc.model.spec import ModelSpec
from calc.training.autograd.segments import Constant, Segment
from calc.training.pipeline_stages import Stage
from calc.training.plan import TrainingPlan
from calc.training.states.sharding import Placed


class StageParts(NamedTuple):
    """What one stage runs and keeps: its segments in order of execution, and the constants that the model or its caller keeps.

    `reference`: tensors of a second, frozen model. `passes`: phases of their own, before the forward.
    """

    segments: tuple[Segment, ...]
    constants: tuple[Constant, ...]
    reference: tuple[Placed, ...] = ()
    passes: tuple[Segment, ...] = ()


def _no_notes(plan: TrainingPlan, spec: ModelSpec) -> Iterable[str]:
    return ()


def _no_buffer(plan: TrainingPlan, spec: ModelSpec) -> int:
    return 0


class Program(NamedTuple):
    """One row of the table of programs.

    `parts`: those of a stage with these tensors; InputError where the program is not modelled for the model. `notes`: what an
    answer must say of the program. `workspace`: bytes that it allocates once, beyond its tensors and cuBLAS's workspace.
    """

    parts: Callable[[TrainingPlan, ModelSpec, Stage, tuple[Placed, ...]], StageParts]
    notes: Callable[[TrainingPlan, ModelSpec], Iterable[str]] = _no_notes
    workspace: Callable[[TrainingPlan, ModelSpec], int] = _no_buffer
