"""`train`: what one training step needs on each device, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from calc.breakdown import Breakdown, Component
from calc.hardware import Gpu
from calc.model.feed_forward import MoE
from calc.model.mixers import Attention, Recurrence
from calc.model.spec import ModelSpec
from calc.training.autograd.adapters import VARIANTS
from calc.training.device_totals import DeviceTotals, device_totals
from calc.training.megatron.stage import score_buffer
from calc.training.model_classes import model_class
from calc.training.overhead import SOURCES, Overhead
from calc.training.peak_breakdown import components
from calc.training.pipeline_stages import must_be_modelled, stages
from calc.training.plan import TrainingPlan
from calc.training.plan_rules import check
from calc.training.published_counts import zero_paper_activations
from calc.training.stage_memory import StageMemory, stage_memory
from calc.training.states.nf4_loading import NOTES as QUANTISED
from calc.training.states.nf4_loading import loading
from calc.training.states.offload import NOTES, Offloaded, offloaded
from calc.training.states.recipes import OPTIMIZERS, RECIPES
from calc.training.states.sharding import StateKey
from calc.training.states.tensors import idle_towers
from calc.training.torchtitan.stage import torchtitan_notes
from calc.training.transformers.notes import remarks
from calc.training.transformers.stage import needs_eager

# The number format that a recipe's matmuls must have; the others run in fp16 or fp32 just as well.
_FORMATS = {"pure-bf16": "bf16", "megatron-bf16": "bf16", "fsdp-bf16": "bf16", "fp8": "fp8"}


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
        peak, scores = memory.peak[1].bytes, score_buffer(self.plan, self.spec)
        return device_totals(self.plan, self.gpu, peak, idle=memory.idle_pools, experts=experts, scores=scores)

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
        """What the config left open, and what the estimate takes for granted."""
        missing = self.gpu.lacks(_FORMATS.get(self.plan.recipe, "")) if self.gpu else None
        told = [*_assumptions(self.plan, self.spec), *([f"recipe {self.plan.recipe}: {missing}"] if missing else [])]
        return tuple(dict.fromkeys((*self.spec.assumptions, *told, *SOURCES.values())))

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


def _assumptions(plan: TrainingPlan, spec: ModelSpec) -> list[str]:
    labels = (
        "labels are the inputs"
        if spec.has_head
        else "no head and no labels: the step on text ends at the last hidden state"
    )
    told = [f"{labels}, no attention mask is given, gradients are set to None, and the optimizer has its state"]
    told += [note for note in (RECIPES[plan.recipe].note, OPTIMIZERS[plan.optimizer].note) if note]
    told += NOTES[plan.offload]
    told += QUANTISED if plan.method == "qlora" else ()
    told += VARIANTS if plan.lora else ()
    told += spec.beyond_positions("seq", plan.seq)
    idle = idle_towers(spec)
    if idle:
        told.append(
            f"text-only step: {', '.join(idle)} hold weights alone, no gradients, optimizer states or activations"
        )
    others = [tower.name for tower in spec.towers if tower.in_total and tower.name not in idle]
    if others:
        told.append(f"{', '.join(others)}: states are counted, activations are not")
    kinds = dict.fromkeys(kind.mixer.kind for kind in spec.layers.kinds if isinstance(kind.mixer, Recurrence))
    told += (
        remarks(spec)
        if plan.transformers
        else [f"{kind} layers keep their input and what their usual kernel is known to keep" for kind in kinds]
    )
    told += [f"activations are an estimate: {text}" for text in spec.estimates]
    told += _attention(plan, spec)
    told += _sharding(plan, spec)
    if plan.scores:
        told += _scoring(plan)
    if plan.implementation == "torchtitan":
        told += torchtitan_notes(plan, spec)
    if plan.ep > 1:
        told.append("experts are balanced: every rank serves as many tokens as it holds")
    return told


def _attention(plan: TrainingPlan, spec: ModelSpec) -> Iterator[str]:
    """Where `sdpa` is not what its name promises in transformers."""
    if plan.attention != "sdpa" or not plan.transformers:
        return
    if needs_eager(spec):
        reason = (
            "its class has no SDPA"
            if model_class(spec.architecture).eager_only
            else "capped scores or sinks have no SDPA"
        )
        yield f"attention: transformers runs this model's attention eager ({reason})"
    mixers = [kind.mixer for kind in spec.layers.kinds]
    one = any(isinstance(mixer, Attention) and mixer.num_key_value_heads == 1 for mixer in mixers)
    if model_class(spec.architecture).modeling == "falcon" and one:
        yield (
            "attention: Falcon's class always gives SDPA a mask, and with one key and value head for all queries no fused kernel "
            "takes it: PyTorch's plain mathematics keeps all scores in fp32"
        )


def _sharding(plan: TrainingPlan, spec: ModelSpec) -> Iterator[str]:
    """What FSDP2 does that more ranks do not better, and what its recipe counts without it."""
    if RECIPES[plan.recipe].gathered and plan.zero < 3:
        yield f"recipe {plan.recipe}: FSDP2 is zero 3; with zero {plan.zero} no 16-bit copy of the fp32 weights is counted"
    experts = {kind.feed_forward.num_experts for kind in spec.layers.kinds if isinstance(kind.feed_forward, MoE)}
    for rows in sorted(count // plan.ep for count in experts):
        if StateKey.of(plan).rows and rows < plan.expert_shards:
            yield (
                f"zero 3: FSDP2 shards stacked experts by whole experts, so that {rows} over {plan.expert_shards} ranks are padded to one "
                "each: more ranks hold no fewer, and gather more padding"
            )


def _scoring(plan: TrainingPlan) -> Iterator[str]:
    """What preference and reinforcement learning take for granted."""
    yield f"{plan.objective}: sequences of equal length, without padding; {plan.prompt_tokens} of {plan.seq} tokens are the prompt"
    if plan.holds_reference:
        yield "the reference model has the policy's number format, as TRL loads it, and lies whole on each device"
    elif plan.runs_reference:
        yield "the reference is the base model without its adapters: no second copy"
    if plan.objective == "grpo":
        yield (
            f"transformers generates all {plan.generated:,} completions of an optimizer step at once on each device, in groups of "
            "num_generations; with vLLM on the same GPU its share comes on top, and on other GPUs there is no rollout here"
        )


def train(spec: ModelSpec, plan: TrainingPlan, gpu: Gpu | None = None) -> TrainingAnswer:
    """Memory of one training step of a model under a plan. InputError when the layout does not fit the model."""
    spec.must_read_text()
    must_be_modelled(spec)
    check(plan, spec)
    return TrainingAnswer(spec, plan, gpu, tuple(stage_memory(plan, spec, stage) for stage in stages(plan, spec)))
