"""`train`: what one training step needs on each device, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from calc.breakdown import Breakdown, Component, plain_label
from calc.hardware import Gpu
from calc.model.feed_forward import MoE
from calc.model.spec import ModelSpec
from calc.training.device_totals import DeviceTotals, allocator_limit, device_totals
from calc.training.model_rules import check
from calc.training.notes import assumptions
from calc.training.overhead import Overhead
from calc.training.peak_breakdown import components
from calc.training.pipeline_stages import must_be_modelled, stages
from calc.training.plan import TrainingPlan
from calc.training.programs import program_of
from calc.training.published_counts import zero_paper_activations
from calc.training.stage_memory import StageMemory, stage_memories
from calc.training.states.nf4_loading import loading
from calc.training.states.offload import Offloaded, offloaded


@dataclass(frozen=True, eq=False)
class TrainingAnswer:
    """Bytes of one device: the one with the highest peak; every stage's lie in `stages`."""

    spec: ModelSpec
    plan: TrainingPlan
    gpu: Gpu | None
    stages: tuple[StageMemory, ...]

    @cached_property
    def worst(self) -> StageMemory:
        """The stage with the highest peak; the first of equals."""
        return max(self.stages, key=lambda stage: stage.peak[1].bytes)

    @cached_property
    def breakdown(self) -> Breakdown:
        """What is alive at the peak instant; its leaves sum to `peak_bytes`."""
        return Breakdown(Component("", children=components(self.worst)), "bytes")

    @property
    def peak_bytes(self) -> int:
        return self.worst.peak[1].bytes

    @property
    def peak_phase(self) -> str:
        return self.worst.peak[0]

    @property
    def phases(self) -> dict[str, int]:
        return {phase: moment.bytes for phase, moment in self.worst.moments.items()}

    @property
    def phase_parts(self) -> dict[str, dict[str, int]]:
        """The parts of each phase's highest point by name; they sum to `phases`."""
        return {phase: dict(self.worst.live_parts(phase, moment)) for phase, moment in self.worst.moments.items()}

    def timeline(self) -> Iterator[tuple[str, dict[str, int]]]:
        """The step of the stage that needs most, segment by segment: a name such as `backward, layer 3 of 32`, and the bytes of
        each part at the segment's highest point."""
        segments = self.worst.segments
        layers = [index for index, each in enumerate(segments) if each.inside]
        for phase, index, parts in self.worst.timeline():
            if index < 0:
                yield phase, parts
                continue
            at = (
                f"layer {layers.index(index) + 1} of {len(layers)}"
                if index in layers
                else plain_label(segments[index].path[0])
            )
            yield f"{phase}, {at}", parts

    @property
    def parameters_bytes(self) -> int:
        return self.worst.states[0]

    @property
    def gradients_bytes(self) -> int:
        return self.worst.states[1]

    @property
    def optimizer_bytes(self) -> int:
        return self.worst.states[2]

    @property
    def activations_bytes(self) -> int:
        return self.worst.activations

    @property
    def activation_constant_bytes(self) -> int:
        """The part of `activations_bytes` that does not grow with the micro-batch (one in flight)."""
        return self.worst.constant_activations

    @cached_property
    def totals(self) -> DeviceTotals:
        """What the worst stage's device reserves and shows."""
        return self.totals_of(self.worst)

    def totals_of(self, memory: StageMemory) -> DeviceTotals:
        """What a device of that stage reserves and shows."""
        experts = any(isinstance(kind.feed_forward, MoE) for kind in self.spec.layers.kinds)
        peak, scores = memory.peak[1].bytes, program_of(self.plan).workspace(self.plan, self.spec)
        limit = allocator_limit(self.plan, self.gpu, experts=experts, scores=scores)
        replayed = memory.replayed_within(limit)
        return device_totals(
            self.plan, self.gpu, peak, idle=memory.idle_pools, experts=experts, scores=scores, replayed=replayed
        )

    @property
    def overhead(self) -> Overhead:
        return self.totals.overhead

    @property
    def reserved_bytes(self) -> int:
        return self.totals.reserved_bytes

    @property
    def driver_bytes(self) -> int:
        return self.totals.driver_bytes

    @property
    def driver_upper_bytes(self) -> int:
        """`driver_bytes` with the highest context and fragmentation that were reported."""
        return self.totals.driver_upper_bytes

    @property
    def gpu_memory_bytes(self) -> int | None:
        return self.totals.gpu_memory_bytes

    @property
    def fits(self) -> bool | None:
        """Whether all of it fits in what the driver shows; None without a GPU."""
        return self.totals.fits

    @property
    def fits_at_most(self) -> bool | None:
        """Whether it fits with `driver_upper_bytes` too; None without a GPU."""
        return self.totals.fits_at_most

    @property
    def headroom_bytes(self) -> int | None:
        return self.totals.headroom_bytes

    @cached_property
    def offloaded(self) -> Offloaded:
        """What the worst stage's device keeps in host memory or on NVMe, and moves in one step."""
        return offloaded(self.plan, self.worst.groups, self.worst.key)

    @cached_property
    def assumptions(self) -> tuple[str, ...]:
        """What the config left open, and what the estimate assumes."""
        made = assumptions(self.plan, self.spec, self.gpu)
        free, here = self.worst.replayed, self.totals.overhead.fragmentation
        if free is None or free <= here:
            return made
        return (
            *made,
            "near the GPU's limit the allocator gives back what it caches and asks again, which takes time: it would reserve "
            f"{free - here:,} bytes more on a larger GPU",
        )

    def as_json(self) -> dict[str, Any]:
        """The answer with the keys of `python -m calc train`."""
        return {
            "model": self.spec.name,
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.peak_phase,
            "phases": self.phases,
            "parameters_bytes": self.parameters_bytes,
            "gradients_bytes": self.gradients_bytes,
            "optimizer_bytes": self.optimizer_bytes,
            "activations_bytes": self.activations_bytes,
            "activation_constant_bytes": self.activation_constant_bytes,
            **self.totals.as_json(),
            **self.offloaded.as_json(self.gpu),
            "load_bytes": loading(self.plan, self.spec),
            "gpus": self.plan.gpus,
            "zero_paper_activations_bytes": zero_paper_activations(
                self.plan.micro_batch, self.plan.seq, self.spec.hidden_size, self.spec.num_hidden_layers
            ),
            "stages": [_stage_json(stage) for stage in self.stages],
            "components": self.breakdown.components(),
            "assumptions": list(self.assumptions),
        }


def _stage_json(memory: StageMemory) -> dict[str, Any]:
    phase, moment = memory.peak
    return {
        "stage": memory.stage.rank,
        "layers": len(memory.stage.layers),
        "in_flight": memory.stage.chunks,
        "peak_bytes": moment.bytes,
        "peak_phase": phase,
        "parameters_bytes": memory.states[0],
        "gradients_bytes": memory.states[1],
        "optimizer_bytes": memory.states[2],
        "activations_bytes": memory.activations,
    }


def train(spec: ModelSpec, plan: TrainingPlan, gpu: Gpu | None = None) -> TrainingAnswer:
    """Memory of one training step of a model under a plan. InputError when the layout does not fit the model."""
    spec.must_read_text()
    must_be_modelled(spec)
    check(plan, spec)
    return TrainingAnswer(spec, plan, gpu, stage_memories(plan, spec, stages(plan, spec)))
