"""One training step: the seconds of every pipeline rank, and the parts of the busiest one, which sum to the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from calc.communication import topology_of
from calc.hardware import Gpu
from calc.kernel_times import KernelTimes, kernel_times
from calc.model.spec import ModelSpec
from calc.step_time.communication import (
    DataParallel,
    LayerCommunication,
    data_parallel,
    layer_communication,
    tensor_ends,
)
from calc.step_time.layer_times import LayerSeconds, LayerTimer, Seconds
from calc.step_time.machine import OVERLAP_SLOWDOWN, host_seconds
from calc.step_time.memory_bound import LOSSES, Traffic, loss_of
from calc.step_time.operations import Gemm, LayerOperations, Sharding, end_parameters, head_gemms, stack_operations
from calc.step_time.optimizer import HOST_ADAM, offload_bytes, optimizer_bytes
from calc.step_time.pipelining import layers_of_ranks, pipeline_bubble
from calc.step_time.plan import TimePlan
from calc.step_time.vision import tower_of, tower_parameters, tower_seconds
from calc.units import ceil_div

# shares of the launches that the host still pays with CUDA graphs: of the experts' kernels, and of all others
_LAUNCHED: Final[Mapping[str, tuple[float, float]]] = {"none": (1.0, 1.0), "attention": (1.0, 0.0), "full": (0.0, 0.0)}
_NOTHING: Final = Seconds()


@dataclass(frozen=True)
class RankSeconds:
    """One micro-batch on one pipeline rank."""

    rank: int
    layers: LayerSeconds  # of all its layers
    ends: LayerSeconds  # of the embedding, the head and the loss where it holds them, and of the pictures that it reads
    exposed: dict[str, float]  # seconds of communication that nothing hides, forward and backward, by group
    exposed_forward: float
    hidden: float
    host: float
    host_forward: float
    shared: DataParallel
    parameters: float  # of its shard of the optimizer's states

    @cached_property
    def forward(self) -> float:
        """What a pipeline schedules as F."""
        return self.layers.forward.total + self.ends.forward.total + self.exposed_forward + self.host_forward

    @cached_property
    def weight_gradient(self) -> float:
        """What a zero-bubble pipeline schedules as W."""
        return self.layers.weight_gradient.total + self.ends.weight_gradient.total

    @cached_property
    def total(self) -> float:
        """Seconds of one micro-batch, the slowing by overlapped communication apart."""
        passes = (
            each
            for part in (self.layers, self.ends)
            for each in (part.forward, part.input_gradient, part.weight_gradient, part.again)
        )
        return sum(one.total for one in passes) + sum(self.exposed.values()) + self.host

    @cached_property
    def whole(self) -> float:
        """Seconds of one micro-batch with that slowing."""
        return self.total + OVERLAP_SLOWDOWN * self.hidden


class Step:
    """A plan's step on a GPU; each part is worked out when it is first asked for."""

    def __init__(self, spec: ModelSpec, plan: TimePlan, gpu: Gpu) -> None:
        self.spec, self.plan, self.gpu = spec, plan, gpu
        self.kernels: KernelTimes = kernel_times(gpu, plan.times, engine="trtllm")
        self.topology = topology_of(gpu, plan.times, plan.gpus_per_node, plan.intra_GBps, plan.inter_GBps)
        self.sharding = Sharding(
            plan.tokens_of_rank,
            plan.tp,
            plan.cp,
            plan.ep,
            plan.sharded_sequence,
            joins_projections=plan.implementation == "fused",
            whole_experts=plan.ep_over_tp,
        )
        self.timer = LayerTimer(gpu, plan, self.kernels, self.sharding)

    @cached_property
    def operations(self) -> tuple[LayerOperations, ...]:
        """The operations of each kind of layer."""
        return stack_operations(self.spec, self.plan.seq, self.sharding)

    @cached_property
    def kinds(self) -> tuple[LayerSeconds, ...]:
        """Device seconds of each kind of layer."""
        self.timer.prepare(
            [*(gemm for one in self.operations for gemm in one.gemms), *head_gemms(self.spec, self.sharding)]
        )
        return tuple(self.timer.layer(one) for one in self.operations)

    @cached_property
    def exchanged(self) -> tuple[LayerCommunication, ...]:
        """Communication of each kind of layer."""
        return tuple(
            layer_communication(one, seconds, self.plan, self.topology, self.sharding)
            for one, seconds in zip(self.operations, self.kinds, strict=True)
        )

    @cached_property
    def head(self) -> LayerSeconds:
        """The output head with its loss."""
        gemms = head_gemms(self.spec, self.sharding)
        loss = None
        if gemms:
            each = LOSSES[loss_of(self.plan)]
            logits = float(gemms[0].m) * gemms[0].n
            loss = Traffic("loss", logits * each.forward, logits * each.backward, each[2], each[3])
        return self.timer.head(gemms, loss)

    @cached_property
    def joining(self) -> LayerSeconds:
        """The product that joins a hidden state with the next token's embedding before a layer of multi-token prediction."""
        h = self.spec.hidden_size
        return self.timer.head(
            (Gemm("mtp", self.sharding.tokens, ceil_div(h, self.plan.tp), 2 * h, part="head"),), None
        )

    @cached_property
    def embedding(self) -> LayerSeconds:
        """The look-up, and its gradient: zeros for the whole table, then rows added."""
        rows = 2.0 * self.sharding.between * self.spec.hidden_size
        table = 2.0 * self.spec.vocab_size / self.plan.tp * self.spec.hidden_size
        forward = float(self.kernels.memory_bound(2 * rows))
        backward = float(self.kernels.memory_bound(3 * rows + table)) if self.plan.method == "full" else 0.0
        return LayerSeconds(
            Seconds({"memory_bound": forward}, 1), Seconds({"memory_bound": backward}, 2), _NOTHING, _NOTHING
        )

    @cached_property
    def tower(self) -> LayerSeconds:
        """The vision tower over the pictures of a micro-batch."""
        return tower_seconds(self.spec, self.timer)

    @cached_property
    def ranks(self) -> tuple[RankSeconds, ...]:
        """Every rank of the pipeline."""
        held = layers_of_ranks(self.plan, self.spec)
        made: dict[tuple[object, ...], RankSeconds] = {}
        found = []
        for rank, (counts, first, last) in enumerate(held):
            key = (tuple(sorted(counts.items())), first, last)
            if key not in made:
                made[key] = self._rank(rank, counts, first, last)
            found.append(made[key])
        return tuple(found)

    def _rank(self, rank: int, counts: Counter[int], first: bool, last: bool) -> RankSeconds:
        mtp = self.plan.mtp_layers if last else 0
        if mtp:  # further tokens are predicted by layers like the last one, next to the head
            counts = counts + Counter({self.spec.layers.pattern[-1]: mtp})
        layers = _summed([(self.kinds[kind], count) for kind, count in counts.items()])
        pictures = [(self.tower, 1)] if first and self.plan.picture_patches else []
        ends = _summed(
            pictures + [(self.embedding, 1)] * first + [(self.head, 1 + mtp)] * last + [(self.joining, mtp)] * last
        )
        exposed: dict[str, float] = {}
        ahead = hidden = 0.0
        for kind, count in counts.items():
            one = self.exchanged[kind]
            hidden += count * one.hidden
            ahead += count * sum(one.exposed_forward.values())
            for part in (one.exposed_forward, one.exposed_backward):
                for name, value in part.items():
                    exposed[name] = exposed.get(name, 0.0) + count * value
        at_ends = tensor_ends(
            self.plan, self.topology, self.sharding, self.spec.hidden_size, first=first, last=last, heads=1 + mtp
        )
        if sum(at_ends):
            exposed["tensor"] = exposed.get("tensor", 0.0) + sum(at_ends)
            ahead += at_ends[0]
        plain, experts = self._parameters(counts, first, last)
        trained = 0.0 if self.plan.method != "full" else 1.0
        shared = data_parallel(self.plan, self.topology, plain, experts, counts.total() + first + last, trained)
        work_forward = layers.forward.total + ends.forward.total
        work_backward = sum(
            part.input_gradient.total + part.weight_gradient.total + part.again.total for part in (layers, ends)
        )
        if shared.forward or shared.backward:
            out_forward = max(0.0, shared.forward - work_forward) + shared.first
            out_backward = max(0.0, shared.backward - work_backward)
            hidden += min(shared.forward, work_forward) + min(shared.backward, work_backward)
            copied = float(self.kernels.memory_bound(shared.copies)) if shared.copies else 0.0
            exposed["data"] = out_forward + out_backward + copied
            ahead += out_forward
        host_forward, host = self._host(layers, ends, work_forward, work_backward, exposed, ahead)
        own = self._own(plain, experts)
        return RankSeconds(rank, layers, ends, exposed, ahead, hidden, host, host_forward, shared, own)

    def _parameters(self, counts: Counter[int], first: bool, last: bool) -> tuple[float, float]:
        ends = end_parameters(self.spec, self.plan.tp)
        plain = float(ends[0] * first + ends[1] * last)
        if first and last and self.spec.tied:
            plain -= self.spec.vocab_size // self.plan.tp * self.spec.hidden_size
        if first and self.plan.picture_patches:
            plain += tower_parameters(tower_of(self.spec))
        experts = 0.0
        for kind, count in counts.items():
            plain += count * self.operations[kind].parameters
            experts += count * self.operations[kind].expert_parameters
        return plain, experts

    def _own(self, plain: float, experts: float) -> float:
        """Parameters whose states the rank updates."""
        if self.plan.method != "full":
            return 0.0  # adapters are below a percent of the weights
        if not self.plan.zero:
            return plain + experts
        return plain / self.plan.shards + experts / max(1, self.plan.expert_shards)

    def _host(
        self,
        layers: LayerSeconds,
        ends: LayerSeconds,
        work_forward: float,
        work_backward: float,
        exposed: dict[str, float],
        ahead: float,
    ) -> tuple[float, float]:
        """What the host's launches take beyond the device's work, in forward and in both directions."""
        of_experts, of_others = _LAUNCHED[self.plan.cuda_graphs]
        each = host_seconds(self.kernels)
        ahead_passes = (layers.forward, ends.forward)
        back_passes = tuple(
            one for part in (layers, ends) for one in (part.input_gradient, part.weight_gradient, part.again)
        )

        def late(passes: tuple[Seconds, ...], work: float, sent: float) -> float:
            others = each * of_others * sum(one.kernels for one in passes)
            own = each * of_experts * sum(one.expert_kernels for one in passes)
            # the host learns how many rows each expert has by waiting for the device: it cannot launch their kernels ahead, only while
            # rows travel and experts work
            waited = own - sum(one.families.get("experts", 0.0) for one in passes) - sent
            return max(0.0, waited, others + own - work - sent)

        behind = sum(exposed.values()) - ahead
        late_forward = late(ahead_passes, work_forward, ahead)
        return late_forward, late_forward + late(back_passes, work_backward, behind)

    @cached_property
    def busiest(self) -> RankSeconds:
        """The rank that the others wait for."""
        return max(self.ranks, key=lambda rank: rank.whole)

    @cached_property
    def bubble(self) -> float:
        """Seconds that the busiest rank waits for others while the pipeline fills and drains."""
        return pipeline_bubble(self.plan, self.ranks)

    @cached_property
    def sends(self) -> float:
        """Exposed sends: those of the first micro-batch down the pipeline and of the last one back; the others overlap with work."""
        plan = self.plan
        if plan.pp == 1:
            return 0.0
        size = 2.0 * self.sharding.between * self.spec.hidden_size
        once = self.topology.seconds("send", size, 2, plan.tp * plan.cp * plan.dp)
        return 2 * (plan.pp * plan.virtual_stages - 1) * once

    @cached_property
    def optimizer(self) -> float:
        """The optimizer's step on the device, or on the host where its states live."""
        own = self.busiest.parameters
        if self.plan.offload != "none":
            return own * HOST_ADAM
        moved = own * optimizer_bytes(self.plan)
        if self.plan.compute_format in ("fp8", "fp8-block", "mxfp8", "nvfp4"):
            moved += own * 4.0  # the weights are cast once a step
        return float(self.kernels.memory_bound(moved)) if moved else 0.0

    @cached_property
    def transfers(self) -> float:
        """Seconds between device and host for what is offloaded: half of them overlap the backward at best, none is counted so."""
        moved = self.busiest.parameters * offload_bytes(self.plan)
        rate = self.gpu.pcie_bandwidth or 16e9
        if self.plan.nvme:
            rate = min(rate, (self.plan.nvme_GBps or 1.6) * 1e9)
        return moved / rate

    @cached_property
    def reduced(self) -> tuple[float, float]:
        """Exposed and hidden seconds of the collectives that a step runs once: behind the last backward, and the next first forward."""
        shared, rank = self.busiest.shared, self.busiest
        if not self.plan.dp_overlap:
            return shared.reduce_once + shared.gather_once, 0.0
        backward = rank.total - rank.forward
        hidden = min(shared.reduce_once, backward) + min(shared.gather_once, rank.forward)
        return shared.reduce_once + shared.gather_once - hidden, hidden


def _summed(parts: list[tuple[LayerSeconds, int]]) -> LayerSeconds:
    forward = inputs = weights = again = _NOTHING
    for one, count in parts:
        forward += one.forward.times(count)
        inputs += one.input_gradient.times(count)
        weights += one.weight_gradient.times(count)
        again += one.again.times(count)
    return LayerSeconds(forward, inputs, weights, again)
