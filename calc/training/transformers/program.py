"""transformers' row in the table of programs."""

from __future__ import annotations

from calc.model.spec import ModelSpec
from calc.training.pipeline_stages import Stage
from calc.training.plan import TrainingPlan
from calc.training.program import Program, StageParts
from calc.training.states.sharding import Placed
from calc.training.states.stage_tensors import model_of
from calc.training.transformers import trl_objectives
from calc.training.transformers.notes import notes
from calc.training.transformers.stage import hf_constants, hf_segments


def _parts(plan: TrainingPlan, spec: ModelSpec, stage: Stage, groups: tuple[Placed, ...]) -> StageParts:
    segments = tuple(hf_segments(plan, spec, stage, model_of(plan, spec)))
    constants = tuple(hf_constants(plan, spec, stage))
    if not plan.scores:
        return StageParts(segments, constants)
    constants += tuple(trl_objectives.trainer_constants(plan, spec, stage, segments))
    if plan.objective == "dpo" and plan.runs_reference:
        segments += (trl_objectives.reference_pass(plan, spec, stage, ("reference",)),)
    reference = trl_objectives.reference_groups(groups) if plan.holds_reference else ()
    return StageParts(segments, constants, reference, trl_objectives.passes(plan, spec, stage))


TRANSFORMERS = Program(_parts, notes)
