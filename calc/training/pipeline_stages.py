"""Which blocks a pipeline stage holds, how often, and with how many micro-batches in flight."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import NamedTuple

from calc.errors import InputError
from calc.model.spec import ModelSpec
from calc.pipeline import in_flight
from calc.pipeline.orders import model_stage
from calc.pipeline.schedules import SCHEDULES
from calc.training.plan import TrainingPlan


class Stage(NamedTuple):
    """One rank of the pipeline: its layers in order of depth (their kinds), the ends it holds, the chunks in flight.

    `chunks` counts (micro-batch, chunk) pairs of which `virtual` make the whole rank.
    """

    rank: int
    layers: tuple[int, ...]
    first: bool
    last: bool
    begins: bool  # the model's very first layer is here
    chunks: int
    virtual: int

    @property
    def counts(self) -> Counter[int]:
        return Counter(self.layers)


def _shape(schedule: str) -> str:
    return "v" if SCHEDULES[schedule].chunks == "two" else "loop"


def must_be_modelled(spec: ModelSpec) -> None:
    """InputError for layers whose training is not modelled."""
    if any(kind.reused or kind.second or getattr(kind.mixer, "routed", False) for kind in spec.layers.kinds):
        raise InputError(
            f"model: layers of {spec.name} share weights, hold two mixers or route attention: their training is not modelled; "
            "python -m measure trace runs the real step",
            "model",
        )


def part_starts(plan: TrainingPlan, layers: int) -> tuple[int, ...]:
    """Where each part of the model begins, in order of depth, and where the last ends: pp · virtual_stages parts. Layers are dealt out
    evenly, the first parts one longer where they do not divide. Where the first or the last stage has its own number, it and the rest
    divide evenly (megatron/core/transformer/transformer_block.py, get_num_layers_to_build); InputError where they do not.
    torchtitan counts the embedding and the head as a layer each (distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part)."""
    p, v, ends = plan.pp, plan.virtual_stages, (plan.first_stage_layers, plan.last_stage_layers)
    if ends == (None, None) and plan.implementation == "torchtitan":
        size, longer = divmod(layers + 2, p * v)
        of_part = [size + (part < longer) for part in range(p * v)]
        of_part[0] -= 1
        of_part[-1] -= 1
        return tuple(accumulate(of_part, initial=0))
    if ends == (None, None):
        size, longer = divmod(layers, p * v)
        return tuple(part * size + min(part, longer) for part in range(p * v + 1))
    if _shape(plan.schedule) == "v":
        raise InputError.of(
            "schedule", plan.schedule, "stages with layers of their own need one that loops over the stages"
        )
    given = sum(each for each in ends if each is not None)
    between = p - sum(each is not None for each in ends)
    rest = layers - given
    if rest < 0 or (rest % (between * v) if between else rest):
        raise InputError(
            f"first_stage_layers ({ends[0]}) and last_stage_layers ({ends[1]}): pp * virtual_stages ({p} * {v}) must divide the rest "
            f"of the {layers} layers evenly",
            "first_stage_layers",
        )
    each = rest // between if between else 0
    of_rank = [each if ends[0] is None else ends[0], *[each] * (p - 2), each if ends[1] is None else ends[1]]
    for size in of_rank:
        if size % v:
            raise InputError.of("virtual_stages", v, f"it must divide the {size} layers of each stage")
    return tuple(accumulate([of_rank[part % p] // v for part in range(p * v)], initial=0))


def stages(plan: TrainingPlan, spec: ModelSpec) -> tuple[Stage, ...]:
    """Every rank of the pipeline, its layers as `part_starts` deals them out.

    InputError for layers whose training is not modelled.
    """
    must_be_modelled(spec)
    pattern = spec.layers.pattern
    p, v = plan.pp, plan.virtual_stages
    if p == 1:
        return (Stage(0, pattern, True, True, True, 1, 1),)
    starts = part_starts(plan, len(pattern))
    micro_batches = in_flight(plan.schedule, p, plan.microbatches, v)
    made = []
    for rank in range(p):
        parts = [model_stage(_shape(plan.schedule), p, rank, chunk) for chunk in range(v)]
        layers = tuple(kind for part in sorted(parts) for kind in pattern[starts[part] : starts[part + 1]])
        made.append(Stage(rank, layers, 0 in parts, p * v - 1 in parts, 0 in parts, micro_batches[rank], v))
    return tuple(made)
