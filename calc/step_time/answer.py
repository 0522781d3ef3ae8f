"""`time`: how long one training step takes, where its seconds go, and what a run costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from calc.breakdown import Breakdown, Component, Formula
from calc.communication import network_note
from calc.errors import InputError
from calc.flops import PassFlops, adapter_flops, pass_flops
from calc.hardware import Gpu
from calc.model.feed_forward import MoE
from calc.model.spec import ModelSpec
from calc.step_time.labels import part_label
from calc.step_time.layer_times import FAMILIES, LayerSeconds, Seconds
from calc.step_time.machine import OPERATOR_READINGS, OVERLAP_SLOWDOWN, OVERLAP_SOURCE, host_seconds, sustained
from calc.step_time.memory_bound import program_of
from calc.step_time.money import Price, Run, price_of, run_of
from calc.step_time.plan import TimePlan
from calc.step_time.record import band
from calc.step_time.step import Step
from calc.step_time.vision import picture_flops, tower_of

_SOURCES: Final = {
    "gemms": "matrix products: kernel times by shape",
    "experts": "grouped products of the experts: kernel times by shape",
    "attention": "attention's core: kernel times by shape; backward 2.5 times the FLOPs (arXiv 2407.08608)",
    "recurrence": "the recurrence's scan: kernel times of its FLOPs",
    "memory_bound": "bytes that the program's operators move, over the memory bandwidth that copies reach",
    "tensor": "collectives around each tensor-parallel block that no product hides",
    "context": "ring of keys and values that attention does not hide",
    "expert": "experts' dispatch and combine",
    "data": "gathers and reductions that the products do not hide",
}


@dataclass(frozen=True, eq=False)
class TimeAnswer:
    """Seconds of one step. `low` and `high` bound `step_seconds` as the record of published runs has it."""

    spec: ModelSpec
    plan: TimePlan
    gpu: Gpu
    step: Step

    @cached_property
    def breakdown(self) -> Breakdown:
        """The parts of the busiest rank's step; they sum to `step_seconds`."""
        return Breakdown(Component("step", children=tuple(self._parts())), "seconds", part_label)

    @cached_property
    def step_seconds(self) -> float:
        return float(self.breakdown.total)

    @property
    def tokens_per_s(self) -> float:
        return self.plan.tokens_of_step / self.step_seconds

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.plan.gpus

    @cached_property
    def _flops(self) -> PassFlops:
        """FLOPs of a token in training, causal."""
        plan, lora = self.plan, self.plan.lora
        if lora is None:
            return pass_flops(self.spec, plan.seq, plan.recompute)
        modules = tuple(weight.module for part in self.spec.layers.kinds[0].parts for weight in part.weights)
        return adapter_flops(self.spec, plan.seq, lora.rank, lambda name: lora.takes(modules, name), plan.recompute)

    @cached_property
    def _picture_flops(self) -> float:
        """FLOPs of a sequence's pictures for each of its tokens: forward, and twice that backward (once where the weights are frozen)."""
        if not self.plan.picture_patches:
            return 0.0
        passes = 3 if self.plan.method == "full" else 2
        return passes * picture_flops(self.spec, self.plan) / self.plan.seq

    @property
    def model_tflops_per_gpu(self) -> float:
        return self.tokens_per_s_per_gpu * (self._flops.model + self._picture_flops) / 1e12

    @property
    def peak(self) -> float | None:
        """The dense peak of the format that the products take, in FLOP/s."""
        kinds = {"fp8-block": "fp8", "mxfp8": "fp8", "nvfp4": "fp4", "fp32": "tf32"}
        return self.gpu.peak_flops(kinds.get(self.plan.compute_format, self.plan.compute_format))

    @property
    def mfu(self) -> float | None:
        return self.model_tflops_per_gpu * 1e12 / self.peak if self.peak else None

    @property
    def hfu(self) -> float | None:
        if self.mfu is None:
            return None
        again = float(self._flops.recomputed)
        if self.plan.picture_patches and self.plan.recompute == "full":
            again += picture_flops(self.spec, self.plan) / self.plan.seq
        return self.mfu * (1 + again / (self._flops.model + self._picture_flops) / self.plan.recompute_every)

    @property
    def low(self) -> float:
        return self.step_seconds * band(self.plan, self.spec)[0]

    @property
    def high(self) -> float:
        return self.step_seconds * band(self.plan, self.spec)[1]

    @property
    def source(self) -> str:
        return self.step.kernels.source

    @cached_property
    def price(self) -> Price:
        return price_of(self.gpu, self.plan.price_per_gpu_hour)

    @cached_property
    def run(self) -> Run:
        """The whole run. A checkpoint holds weights and AdamW's state, 16 bytes a parameter of the rank's shard."""
        return run_of(self.plan, self.gpu, self.step_seconds, 16 * self.step.busiest.parameters, self.price)

    def as_json(self) -> dict[str, Any]:
        """The answer with the keys of `python -m calc time`."""
        names = (
            "step_seconds", "tokens_per_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu", "hfu", "low", "high", "source",
        )  # fmt: skip
        run = self.run
        return {
            "model": self.spec.name,
            "gpu": self.gpu.name,
            "gpus": self.plan.gpus,
            **{name: getattr(self, name) for name in names},
            "stage_seconds": [rank.whole for rank in self.step.ranks],
            "tokens": self.plan.tokens or self.plan.tokens_of_step,
            "seconds": run.seconds,
            "gpu_hours": run.gpu_hours,
            "price_per_gpu_hour": self.price.dollars,
            "price_source": self.price.source,
            "cost": run.cost,
            "energy_kwh": run.energy_kwh,
            "carbon_kg": run.carbon_kg,
            "failures": run.failures,
            "checkpoint_seconds": run.checkpoint_seconds,
            "checkpoint_interval_seconds": run.interval_seconds,
            "useful_share": run.useful,
            "components": self.breakdown.components(),
            "assumptions": list(self.spec.assumptions),
            "notes": list(self._notes()),
        }

    def _parts(self) -> Iterator[Component]:
        step, rank, m = self.step, self.step.busiest, self.plan.microbatches
        yield from _passes("layers", rank.layers, m)
        yield from _passes("ends", rank.ends, m)
        sent = tuple(_leaf(name, m, value, _SOURCES[name]) for name, value in rank.exposed.items() if value)
        if sent:
            yield Component("exposed_communication", children=sent)
        exposed, hidden = step.reduced
        if exposed:
            yield _once(
                "exposed_gradients_and_weights",
                exposed,
                "reduced behind the last backward, gathered behind the next forward",
            )
        if rank.hidden:
            slow = OVERLAP_SLOWDOWN * rank.hidden
            yield _leaf("slowed_by_overlap", m, slow, OVERLAP_SOURCE)
        if hidden:
            yield _once("slowed_by_reduction", OVERLAP_SLOWDOWN * hidden, OVERLAP_SOURCE)
        if rank.host:
            yield _leaf("host", m, rank.host, "launches of kernels by the host that the device waits for")
        if self.plan.pp > 1:
            yield _once("bubble", step.bubble, f"schedule {self.plan.schedule} with each rank's own seconds")
            yield _once("exposed_sends", step.sends, "sends between stages while the pipeline fills and drains")
        yield _once(
            "optimizer",
            step.optimizer,
            "bytes of states, weights and gradients of the rank's shard, or the host's Adam",
        )
        if self.plan.offload != "none":
            yield _once("transfers", step.transfers, "gradients and weights between device and host (arXiv 2101.06840)")

    def _notes(self) -> Iterator[str]:
        yield f"operators: {program_of(self.plan).name}; attention: {self.plan.attention_program}"
        yield from self.step.kernels.notes
        yield from network_note(self.gpu, self.step.topology, self.plan.gpus, self.plan.inter_GBps)
        found = sustained(self.gpu, "fp8" if "fp8" in self.plan.compute_format else "bf16")
        if found is not None:
            yield f"products sustain {found.tflops:g} TFLOP/s of {found.dtype} at the power limit: {found.source}"
        yield band(self.plan, self.spec)[2]
        if self.step.busiest.host:
            each, (least, most) = host_seconds(self.step.kernels), OPERATOR_READINGS
            yield (
                f"host: {1e6 * each:g} us an operator; readings run from {1e6 * least:g} (torch's linear layer on an x86 host) to "
                f"{1e6 * most:g} (Transformer Engine's on Grace)"
            )
        if any(isinstance(kind.feed_forward, MoE) for kind in self.spec.layers.kinds):
            yield f"experts: the busiest rank has {self.plan.expert_skew:g} times the mean"
        if self.plan.picture_patches:
            yield (
                "pictures: the vision tower trains with the rest and runs whole on each rank that embeds; every patch meets all others of "
                "its picture"
            )
        elif any(tower.in_total for tower in self.spec.towers):
            yield "the step reads text alone: what encodes pictures or sound is not timed; picture_patches says what pictures it reads"
        if self.plan.objective not in ("pretrain", "sft"):
            yield f"objective {self.plan.objective}: the policy's update alone; reference and rollout are not timed"
        if self.plan.dropout == "config" and self.spec.dropout:
            yield "dropout's masks are not timed"
        yield from self.spec.beyond_positions("seq", self.plan.seq)


def _passes(name: str, part: LayerSeconds, m: int) -> Iterator[Component]:
    """One node a pass, one leaf a family."""
    passes = (
        ("forward", part.forward),
        ("input_gradient", part.input_gradient),
        ("weight_gradient", part.weight_gradient),
        ("recomputed", part.again),
    )
    nodes = tuple(Component(label, children=_families(one, m)) for label, one in passes if one.total)
    if nodes:
        yield Component(name, children=nodes)


def _families(one: Seconds, m: int) -> tuple[Component, ...]:
    return tuple(_leaf(name, m, one.families[name], _SOURCES[name]) for name in FAMILIES if one.families.get(name, 0.0))


def _leaf(name: str, m: int, seconds: float, source: str) -> Component:
    formula = Formula(r"<m> \cdot <t>", source, "", ("each micro-batch takes as long",))
    return Component(name, m * seconds, formula=formula, numbers={"m": m, "t": seconds})


def _once(name: str, seconds: float, source: str) -> Component:
    return Component(name, seconds, formula=Formula("<t>", source), numbers={"t": seconds})


def step_time(spec: ModelSpec, plan: TimePlan, gpu: Gpu | None = None) -> TimeAnswer:
    """Seconds of one training step of a model under a plan on GPUs of one kind, part by part.

    InputError without a GPU, where the layout does not fit the model, and where the GPU lacks the number format.
    """
    spec.must_read_text()
    if plan.picture_patches:
        tower_of(spec)
    if gpu is None:
        raise InputError(
            "gpu: none is given; time needs one of python -m calc gpus, such as --gpu h100-sxm-80gb", "gpu"
        )
    _check(plan, spec)
    return TimeAnswer(spec, plan, gpu, Step(spec, plan, gpu))


def _check(plan: TimePlan, spec: ModelSpec) -> None:
    """InputError unless layers, heads and experts divide as the plan asks."""
    layers = spec.num_hidden_layers
    ends = 2 if plan.implementation == "fused" else 0  # Megatron may count embedding and head as layers of the pipeline
    if plan.pp * plan.virtual_stages > layers + ends:
        product = f"pp * virtual_stages ({plan.pp} * {plan.virtual_stages})"
        raise InputError(f"{product} must be at most num_hidden_layers ({layers})", "pp")
    spec.refuse_stages(plan.pp)
    experts = [kind.feed_forward for kind in spec.layers.kinds if isinstance(kind.feed_forward, MoE)]
    if plan.ep > 1 and not experts:
        raise InputError.of("ep", plan.ep, f"{spec.name} has no experts, so it must be 1")
    for moe in experts:
        if moe.num_experts % plan.expert_ranks:
            times = f" * tp ({plan.ep} * {plan.tp})" if plan.ep_over_tp else f" ({plan.ep})"
            raise InputError(f"ep{times} must divide num_experts ({moe.num_experts})", "ep")
    for kind in spec.layers.kinds:
        heads = getattr(kind.mixer, "num_attention_heads", plan.tp)
        if heads % plan.tp:
            raise InputError(f"tp ({plan.tp}) must divide num_attention_heads ({heads})", "tp")
