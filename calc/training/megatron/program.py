"""Megatron's row in the table of programs, with Transformer Engine (fused) and as arXiv 2205.05198 counts it (paper)."""

from __future__ import annotations

from collections.abc import Iterator

from calc.model.mixers import Recurrence
from calc.model.spec import ModelSpec
from calc.training.megatron.stage import ledger_constants, ledger_segments, score_buffer
from calc.training.pipeline_stages import Stage
from calc.training.plan import TrainingPlan
from calc.training.program import Program, StageParts
from calc.training.states.sharding import Placed
from calc.training.states.stage_tensors import model_of


def _parts(plan: TrainingPlan, spec: ModelSpec, stage: Stage, groups: tuple[Placed, ...]) -> StageParts:
    segments = ledger_segments(plan, spec, stage, model_of(plan, spec))
    return StageParts(tuple(segments), tuple(ledger_constants(plan, spec, stage)))


def _notes(plan: TrainingPlan, spec: ModelSpec) -> Iterator[str]:
    kinds = dict.fromkeys(kind.mixer.kind for kind in spec.layers.kinds if isinstance(kind.mixer, Recurrence))
    yield from (f"{kind} layers keep their input and what their usual kernel is known to keep" for kind in kinds)


MEGATRON = Program(_parts, _notes, score_buffer)
