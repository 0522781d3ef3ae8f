"""What the ranks send each other in a step, and how much of it the products do not hide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from calc.communication import Topology, context_exchanges, tensor_blocks
from calc.communication.collectives import Exchange
from calc.kernel_times.times import Collective as Kind
from calc.model.feed_forward import MoE
from calc.step_time.layer_times import LayerSeconds
from calc.step_time.operations import LayerOperations, Sharding
from calc.step_time.plan import TimePlan

# Overlapped tensor parallelism cuts each collective into four parts, of which one stays exposed (Megatron-Bridge, performance
# guide, "TP communication overlap": four splits, one chunk of the reduce-scatter remains exposed)
_TP_EXPOSED: Final = 1 / 4
_TP_SOURCE: Final = "Megatron-Bridge performance guide: four splits, of which one is exposed"


@dataclass(frozen=True, slots=True)
class LayerCommunication:
    """Seconds of one layer and micro-batch by group: exposed in forward and backward, and hidden behind products."""

    exposed_forward: dict[str, float]
    exposed_backward: dict[str, float]
    hidden: float


def layer_communication(
    operations: LayerOperations, seconds: LayerSeconds, plan: TimePlan, topology: Topology, sharding: Sharding
) -> LayerCommunication:
    """Tensor, context and expert parallelism's collectives of one layer."""
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    hidden = 0.0
    if plan.tp > 1:
        exposed, behind = _tensor(operations, plan, topology, sharding)
        again = exposed / plan.recompute_every if plan.recompute == "full" else 0.0
        forward["tensor"], backward["tensor"] = exposed, exposed + again
        hidden += 3 * behind
    if plan.cp > 1:
        cores = (part.families.get("attention", 0.0) for part in (seconds.forward, seconds.input_gradient))
        (ahead, behind), (back, after) = (
            _context(found, core, plan, topology)
            for found, core in zip(_context_exchanges(operations, plan, sharding), cores, strict=True)
        )
        again = 1 / plan.recompute_every if plan.recompute == "full" else 0.0
        forward["context"], backward["context"] = ahead, back + again * ahead
        hidden += behind + after + again * behind
    if plan.expert_ranks > 1 and isinstance(operations.kind.feed_forward, MoE):
        exchange = _experts(operations.kind.feed_forward, plan, topology, sharding)
        times = 1 + 1 / plan.recompute_every if plan.recompute == "full" else 1.0
        share = _exposed_exchange(exchange * (1 + times), seconds, plan)
        forward["expert"], backward["expert"] = share * exchange, share * exchange * times
        hidden += (1 - share) * exchange * (1 + times)
    return LayerCommunication(forward, backward, hidden)


def _tensor(operations: LayerOperations, plan: TimePlan, topology: Topology, sharding: Sharding) -> tuple[float, float]:
    """Exposed and hidden seconds of one direction: an all-gather and a reduce-scatter around each block, or an all-reduce."""
    layer = operations.kind
    blocks = tensor_blocks(layer)
    if plan.ep_over_tp and isinstance(layer.feed_forward, MoE):
        blocks -= 1  # the experts' rows go from the divided sequence to their ranks
    hidden = next((norm.size.size for norm in layer.norms), 0)
    size = 2.0 * sharding.tokens * hidden
    if plan.sharded_sequence:
        once = topology.seconds("all_gather", size, plan.tp) + topology.seconds("reduce_scatter", size, plan.tp)
    else:
        once = topology.seconds("all_reduce", size, plan.tp)
    total = blocks * once
    exposed = total * _TP_EXPOSED if plan.overlaps_tp else total
    return exposed, total - exposed


def tensor_ends(
    plan: TimePlan, topology: Topology, sharding: Sharding, hidden: int, *, first: bool, last: bool, heads: int
) -> tuple[float, float]:
    """Seconds of tensor parallelism's collectives at the embedding and at the heads, forward and backward; nothing hides them.

    The embedding's rows are summed up, and their gradients gathered; a head's input is gathered, its gradient summed up, and the loss
    over the divided vocabulary needs a maximum, a sum and the target's logit of each token.
    """
    if plan.tp == 1:
        return 0.0, 0.0
    size, divided = 2.0 * sharding.tokens * hidden, plan.sharded_sequence
    summed = topology.seconds("reduce_scatter" if divided else "all_reduce", size, plan.tp)
    gathered = topology.seconds("all_gather", size, plan.tp) if divided else 0.0
    losses = 3 * topology.seconds("all_reduce", 4.0 * sharding.tokens, plan.tp)
    forward = first * summed + last * heads * (gathered + losses)
    return forward, first * gathered + last * heads * summed


def _context_exchanges(
    operations: LayerOperations, plan: TimePlan, sharding: Sharding
) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """What context parallelism exchanges of a layer's cores, forward and backward, in 16 bits."""
    kv, heads = (
        sum(2 * sharding.tokens * getattr(core, count) * (core.head_dim + core.v_head_dim) for core in operations.cores)
        for count in ("kv_heads", "heads")
    )
    return context_exchanges(plan.context_exchange, plan.implementation, plan.cp, kv=kv, heads=heads, width=2)


def _context(found: tuple[Exchange, ...], core: float, plan: TimePlan, topology: Topology) -> tuple[float, float]:
    """Exposed and hidden seconds of one direction: attention hides what ranks pass on while it works on what came before, but no
    collective that it waits for."""
    waited = sent = 0.0
    for one in found:
        if one.kind == "send":
            sent += one.calls * topology.seconds("send", one.bytes, 2, plan.tp * (plan.cp - 1))
        else:
            waited += one.calls * topology.seconds(one.kind, one.bytes, plan.cp, plan.tp)
    return waited + max(0.0, sent - core), min(sent, core)


def _experts(moe: MoE, plan: TimePlan, topology: Topology, sharding: Sharding) -> float:
    """Dispatch and combine: each token goes to its experts' ranks and comes back, as wide as the experts take it."""
    size = 2.0 * sharding.between * moe.expert.hidden_size * plan.expert_skew
    stride = 1 if plan.ep_over_tp else plan.tp
    if plan.ep_dispatch == "fused":
        return 2 * topology.exchange_once(size, moe.num_experts_per_tok, plan.expert_ranks, stride)
    return 2 * topology.seconds("all_to_all", size * moe.num_experts_per_tok, plan.expert_ranks, stride)


def _exposed_exchange(exchange: float, seconds: LayerSeconds, plan: TimePlan) -> float:
    """The share of a layer's exchanges that nothing hides: all, or with `ep_overlap` those of the first forward and the last backward,
    and what is longer than the work of the other micro-batch (Megatron Core, overlap_moe_expert_parallel_comm)."""
    if not plan.ep_overlap or not exchange:
        return 1.0
    work = sum(part.total for part in (seconds.forward, seconds.input_gradient, seconds.weight_gradient, seconds.again))
    return max(1 / plan.microbatches, 1 - work / exchange)


@dataclass(frozen=True, slots=True)
class DataParallel:
    """Seconds of data parallelism's collectives: those of each micro-batch (forward, backward), and those once a step."""

    forward: float
    backward: float
    gather_once: float
    reduce_once: float
    first: float  # the first gather of a micro-batch, which nothing hides
    copies: float  # bytes that FSDP2 copies into and out of its buffers, a micro-batch


def reduced_bytes(plan: TimePlan) -> int:
    """Bytes of a gradient element on the wire."""
    if plan.reduce_format is not None:
        return 2 if plan.reduce_format == "bf16" else 4
    return 2 if plan.recipe in ("pure-bf16", "mixed-16") else 4


def gathers_eight_bits(plan: TimePlan) -> bool:
    """Whether FSDP gathers weights as fp8: with Transformer Engine's recipes per tensor, in torchtitan where it is asked for."""
    if plan.implementation == "torchtitan":
        return plan.float8_all_gather
    return plan.compute_format == "fp8" and plan.implementation != "hf"


def data_parallel(
    plan: TimePlan, topology: Topology, plain: float, experts: float, layers: int, trained: float = 1.0
) -> DataParallel:
    """Collectives over a rank's parameters: `plain` ones over dp · cp, `experts` over dp · cp / ep. Weights travel in 16 bits
    (8 where fp8 weights are gathered), gradients as `reduced_bytes`; `trained` is the share of the weights that has any."""
    groups = ((plain, plan.dp * plan.cp, plan.tp), (experts, plan.dp * plan.cp // plan.ep, plan.tp * plan.ep))
    weight = 1.0 if gathers_eight_bits(plan) else 2.0
    gradient = reduced_bytes(plan) * trained
    gather = reduce = 0.0
    pieces = max(1, layers)
    for count, ranks, stride in groups:
        if not count or ranks == 1:
            continue
        shards = max(1, ranks // plan.dp_replicate)
        kind: Kind = "reduce_scatter" if plan.zero else "all_reduce"
        reduce += pieces * topology.seconds(kind, gradient * count / pieces, shards if plan.zero else ranks, stride)
        if plan.zero and plan.dp_replicate > 1:
            reduce += topology.seconds("all_reduce", gradient * count / shards, plan.dp_replicate, stride * shards)
        if plan.zero:
            gather += pieces * topology.seconds("all_gather", weight * count / pieces, shards, stride)
    if plan.zero < 3:
        return DataParallel(0.0, 0.0, gather, reduce, 0.0, 0.0)
    twice = gather if plan.reshard_after_forward else 0.0
    # FSDP2 copies weights out of its buffer at each gather and gradients, widened, into it; FSDP flattens the gradients and divides them
    # (torch.distributed.fsdp, _fsdp_collectives.py and _runtime_utils.py)
    per_element = 4.0 * (2 if twice else 1) + 6.0 if plan.implementation == "torchtitan" else 8.0
    copied = (plain + experts) * per_element * trained
    return DataParallel(gather, twice + reduce, 0.0, 0.0, gather / pieces, copied)
