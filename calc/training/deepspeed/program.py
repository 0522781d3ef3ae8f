"""DeepSpeed's row in the table of programs: a transformers model in its engine."""

from __future__ import annotations

from collections.abc import Iterable

from calc.model.spec import ModelSpec
from calc.training.deepspeed.stage import deepspeed_constants
from calc.training.pipeline_stages import Stage
from calc.training.plan import TrainingPlan
from calc.training.program import Program, StageParts
from calc.training.states.sharding import Placed, StateKey


def around(model: Program) -> Program:
    """The engine around a model's program."""

    def parts(plan: TrainingPlan, spec: ModelSpec, stage: Stage, groups: tuple[Placed, ...]) -> StageParts:
        found = model.parts(plan, spec, stage, groups)
        constants = (*found.constants, *deepspeed_constants(plan, groups, StateKey.of(plan)))
        return found._replace(constants=constants)

    def notes(plan: TrainingPlan, spec: ModelSpec) -> Iterable[str]:
        yield from model.notes(plan, spec)
        yield "DeepSpeed 0.12.6: adapters are in the engine's 16 bits; a gradient larger than reduce_bucket_size is not modelled"
        yield "DeepSpeed: stage3_max_live_parameters bounds what is all-gathered ahead, which the prefetch bucket keeps below it here"
        yield "PyTorch up to 2.0 made two temporaries in AdamW's foreach step, where one is modelled; optimizer_kernel loop makes two"

    return Program(parts, notes, model.workspace)
