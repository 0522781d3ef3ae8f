"""torchtitan's row in the table of programs."""

from __future__ import annotations

from calc.model.spec import ModelSpec
from calc.training.pipeline_stages import Stage
from calc.training.plan import TrainingPlan
from calc.training.program import Program, StageParts
from calc.training.states.sharding import Placed
from calc.training.states.stage_tensors import model_of
from calc.training.torchtitan.stage import torchtitan_constants, torchtitan_notes, torchtitan_segments


def _parts(plan: TrainingPlan, spec: ModelSpec, stage: Stage, groups: tuple[Placed, ...]) -> StageParts:
    segments = torchtitan_segments(plan, spec, stage, model_of(plan, spec))
    return StageParts(tuple(segments), tuple(torchtitan_constants(plan, spec, stage)))


TORCHTITAN = Program(_parts, torchtitan_notes)
