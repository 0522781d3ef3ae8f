"""The tensors that one pipeline stage holds."""

from __future__ import annotations

from calc.model.spec import ModelSpec
from calc.training.pipeline_stages import Stage
from calc.training.plan import TrainingPlan
from calc.training.states.sharding import Placed, StateKey
from calc.training.states.tensors import ModelTensors, model_tensors


def model_of(plan: TrainingPlan, spec: ModelSpec) -> ModelTensors:
    return model_tensors(spec, plan.tp, plan.ep, plan.lora, plan.ep_over_tp)


def groups_of(plan: TrainingPlan, spec: ModelSpec, stage: Stage) -> tuple[Placed, ...]:
    """The tensors that a stage holds: its layers, the embedding on the first, the end on the last, towers on the first."""
    tensors = model_of(plan, spec)
    layers = [(tensors.kinds[kind], count) for kind, count in sorted(stage.counts.items())]
    if StateKey.of(plan).rows and plan.transformers and stage.first and stage.last:
        return ((tensors.root, 1), *layers, *tensors.towers)
    groups: list[Placed] = [(tensors.embedding, int(stage.first)), *layers, (tensors.end, int(stage.last))]
    if stage.last and not stage.first:
        groups.append((tensors.tied_head, 1))
    if stage.first:
        groups += tensors.towers
    return tuple((found, count) for found, count in groups if count)
