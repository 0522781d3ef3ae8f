"""Every collective of one training step, in exact bytes.

Conventions: `bytes` of a call is the whole tensor: what an all-reduce takes, what an all-gather gives, what a reduce-scatter takes, what
a rank has for an all-to-all, or the message. DDP, ZeRO and FSDP: arXiv 1910.02054 and 2304.11277; tensor and sequence parallelism:
arXiv 1909.08053 and 2205.05198; context: arXiv 2310.01889, 2309.14509; experts: arXiv 2006.16668.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from calc.communication.plan import CommunicationPlan, ContextExchange
from calc.communication.topology import Group
from calc.kernel_times.times import Collective as Kind
from calc.kernel_times.work import collective_bytes
from calc.model.feed_forward import MoE
from calc.model.mixers import Recurrence
from calc.model.spec import Layer, ModelSpec
from calc.training.pipeline_stages import Stage
from calc.training.states.recipes import RECIPES
from calc.training.states.sharding import StateKey
from calc.training.states.stage_tensors import groups_of
from calc.training.states.tensors import Tensor

Overlap = Literal["nothing", "forward", "backward", "last backward"]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that runs `calls` times in a step. `overlaps` says what compute may hide it; "last backward" is that of
    the last micro-batch, "nothing" that the next operation waits for it."""

    name: str
    kind: Kind
    group: Group
    bytes: int
    calls: int
    overlaps: Overlap = "nothing"

    @property
    def total_bytes(self) -> int:
        """Of all calls of a step."""
        return self.bytes * self.calls

    @property
    def sent_bytes(self) -> int:
        """What one rank sends in a step, by ring: 2 (n-1)/n of an all-reduce, (n-1)/n of a gather, a scatter or an all-to-all."""
        return round(float(collective_bytes(self.kind, self.total_bytes, self.group.ranks)))


class Groups(NamedTuple):
    """The groups that a rank is in."""

    tensor: Group
    context: Group
    shards: Group
    replicas: Group
    experts: Group
    expert_shards: Group
    expert_replicas: Group
    pipeline: Group

    @classmethod
    def of(cls, plan: CommunicationPlan) -> Groups:
        tp, everyone = plan.tp, plan.dp * plan.cp
        shards = everyone // plan.dp_replicate
        return cls(
            tensor=Group("tp", tp, 1),
            context=Group("cp", plan.cp, tp),
            shards=Group("dp", shards, tp),
            replicas=Group("dp replicas", plan.dp_replicate, tp * shards),
            experts=Group("ep", plan.ep, tp),
            expert_shards=Group("dp of experts", shards // plan.ep, tp * plan.ep),
            expert_replicas=Group("dp replicas", plan.dp_replicate, tp * shards),
            pipeline=Group("pp", plan.pp, tp * everyone),
        )


def collectives_of(spec: ModelSpec, plan: CommunicationPlan, stage: Stage) -> tuple[Collective, ...]:
    """What a rank of that pipeline stage takes part in during one step; groups of one rank are left out."""
    groups = Groups.of(plan)
    found = (
        *_data_parallel(spec, plan, stage, groups),
        *_layers(spec, plan, stage, groups),
        *_ends(spec, plan, stage, groups),
        *_sends(spec, plan, stage, groups),
    )
    return tuple(each for each in found if each.group.ranks > 1 and each.bytes and each.calls)


class _Unit(NamedTuple):
    """Tensors that are communicated together, so often: one layer, or what is outside the layers."""

    name: str
    times: int
    tensors: tuple[Tensor, ...]
    layer: bool


def _units(spec: ModelSpec, plan: CommunicationPlan, stage: Stage) -> Iterator[_Unit]:
    """The layers of each kind, and all else as one unit (FSDP's root)."""
    root: list[Tensor] = []
    for group, count in groups_of(plan, spec, stage):
        if "layers" in group.path:
            yield _Unit("/".join(group.path), count, group.tensors, True)
        else:
            root += group.tensors * count
    yield _Unit("root", 1, tuple(root), False)


def _data_parallel(spec: ModelSpec, plan: CommunicationPlan, stage: Stage, groups: Groups) -> Iterator[Collective]:
    """Gradients and weights between data-parallel ranks; experts have fewer copies, so a group of their own."""
    for unit in _units(spec, plan, stage):
        if plan.ep == 1:
            yield from _sharded(plan, unit, groups.shards, groups.replicas)
            continue
        dense = tuple(tensor for tensor in unit.tensors if not tensor.expert)
        experts = tuple(tensor for tensor in unit.tensors if tensor.expert)
        yield from _sharded(plan, unit._replace(tensors=dense), groups.shards, groups.replicas)
        unit = unit._replace(name=f"{unit.name}/experts", tensors=experts)
        yield from _sharded(plan, unit, groups.expert_shards, groups.expert_replicas)


def _sharded(plan: CommunicationPlan, unit: _Unit, shards: Group, replicas: Group) -> Iterator[Collective]:
    weights, gradients = _unit_bytes(plan, unit.tensors, shards.ranks)
    once, each = unit.times, unit.times * plan.microbatches
    if plan.zero == 0:
        everyone = Group(shards.name, shards.ranks * replicas.ranks, shards.stride)
        if plan.gradient_exchange == "parameter-server":
            yield from _served(unit, everyone, weights, gradients)
            return
        yield Collective(f"{unit.name}/gradients", "all_reduce", everyone, gradients, once, "last backward")
        return
    reduced = each if plan.zero > 1 else once
    overlap: Overlap = "backward" if plan.zero > 1 else "last backward"
    yield Collective(f"{unit.name}/gradients", "reduce_scatter", shards, gradients, reduced, overlap)
    part = gradients // shards.ranks
    yield Collective(f"{unit.name}/gradients between replicas", "all_reduce", replicas, part, reduced, overlap)
    if plan.zero < 3:
        yield Collective(f"{unit.name}/weights", "all_gather", shards, weights, once)
        return
    yield Collective(f"{unit.name}/weights, forward", "all_gather", shards, weights, each, "forward")
    if unit.layer and plan.reshard_after_forward:  # FSDP2's root stays whole until its backward
        yield Collective(f"{unit.name}/weights, backward", "all_gather", shards, weights, each, "backward")


def _served(unit: _Unit, everyone: Group, weights: int, gradients: int) -> Iterator[Collective]:
    """A parameter server: each other rank's gradients to one rank, and its weights back, through that rank's link one after another
    (n - 1 messages each way; Li et al., OSDI 2014). The last of them lies a whole group away, which decides the link."""
    messages, far = everyone.ranks - 1, Group(everyone.name, everyone.ranks, everyone.stride * (everyone.ranks - 1))
    yield Collective(
        f"{unit.name}/gradients to the server", "send", far, gradients, unit.times * messages, "last backward"
    )
    yield Collective(f"{unit.name}/weights from the server", "send", far, weights, unit.times * messages)


def _unit_bytes(plan: CommunicationPlan, tensors: tuple[Tensor, ...], ranks: int) -> tuple[int, int]:
    """Bytes of the whole weights and of the whole gradients as they are communicated: padded to equal shards where they are sharded."""
    recipe, key = RECIPES[plan.recipe], StateKey.of(plan)
    weights = gradients = 0
    for tensor in tensors:
        elements = key.elements(tensor, ranks) * ranks if plan.zero else tensor.elements
        rules = key.rules(tensor)
        stored = next(rule.bytes for rule in rules if rule.group == "parameters")
        weights += elements * (recipe.compute if recipe.gathered else stored)
        trained = [rule.bytes for rule in rules if rule.group == "gradients"]
        gradients += elements * trained[0] if trained else 0
    return weights, gradients


def _activation(spec: ModelSpec, plan: CommunicationPlan) -> int:
    """Bytes of one micro-batch's hidden states on a context-parallel rank."""
    return plan.sequences * (plan.seq // plan.cp) * spec.hidden_size * RECIPES[plan.recipe].compute


def _layers(spec: ModelSpec, plan: CommunicationPlan, stage: Stage, groups: Groups) -> Iterator[Collective]:
    """What the layers exchange in their forwards and backwards: partial sums, keys and values, tokens for experts."""
    for kind, count in sorted(stage.counts.items()):
        layer = spec.layers.kinds[kind]
        calls = count * plan.microbatches
        yield from _tensor_parallel(spec, plan, layer, groups, calls)
        yield from _context_parallel(plan, layer, groups, calls)
        if isinstance(layer.feed_forward, MoE):
            size = _activation(spec, plan) * layer.feed_forward.num_experts_per_tok
            if plan.sharded_sequence:
                size //= plan.tp
            forwards = 2 if plan.recompute == "full" else 1
            for name, times in (("forward", forwards), ("backward", 1)):
                for phase in ("dispatch", "combine"):
                    yield Collective(
                        f"{layer.kind}/experts, {phase}, {name}", "all_to_all", groups.experts, size, calls * times
                    )


def tensor_blocks(layer: Layer) -> int:
    """Blocks of a layer whose partial sums tensor parallelism adds up: attention, feed-forward and cross-attention, or one for both
    of the first two where they run side by side."""
    blocks = len(layer.mixers) + bool(layer.feed_forward) + bool(layer.cross)
    return 1 if layer.parallel and blocks == 2 else blocks


def _tensor_parallel(
    spec: ModelSpec, plan: CommunicationPlan, layer: Layer, groups: Groups, calls: int
) -> Iterator[Collective]:
    """One exchange a block and pass: an all-reduce, or with a divided sequence an all-gather before it and a reduce-scatter after.

    Megatron keeps a block's input divided and gathers it once more for the weight's gradient; torch's DTensor keeps it whole.
    """
    blocks = tensor_blocks(layer)
    forwards = 2 if plan.recompute == "full" else 1
    size, name = _activation(spec, plan), f"{layer.kind}/tensor parallel"
    if not plan.sharded_sequence:
        for which, times in (("forward", forwards), ("backward", 1)):
            yield Collective(f"{name}, {which}", "all_reduce", groups.tensor, size, calls * blocks * times)
        return
    again = 1 if plan.implementation in ("fused", "paper") else 0
    for kind, times in (("all_gather", forwards + 1 + again), ("reduce_scatter", forwards + 1)):
        yield Collective(f"{name}, {kind}", kind, groups.tensor, size, calls * blocks * times)  # type: ignore[arg-type]


class Exchange(NamedTuple):
    """A collective of context parallelism that one layer runs `calls` times; `bytes` as those of a `Collective`."""

    name: str
    kind: Kind
    bytes: int
    calls: int


def context_exchanges(
    how: ContextExchange, program: str, cp: int, *, kv: int, heads: int, width: int
) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """What one layer exchanges forward and backward. `kv`: bytes of a rank's own keys and values, `heads` of its queries and outputs,
    `width` of an element.

    A ring passes keys and values on to every other rank, backward once more and their gradients with them: Transformer Engine's in
    16 bits, cp - 1 times (context_parallel.py, AttnFuncWithCPAndKVP2P); PyTorch's in fp32, cp times
    (torch.distributed.tensor.experimental), which torchtitan keeps where it gathers. Transformer Engine gathers again in the backward and
    scatters the gradients; DTensor keeps what was gathered (Llama 3, arXiv 2407.21783). Ulysses (arXiv 2309.14509) exchanges heads.
    """
    if how == "all-to-all":
        both = (Exchange("heads", "all_to_all", kv + heads, 1),)
        return both, both
    ring = how == "ring"
    ahead = Exchange("keys and values", *(("send", kv, cp - 1) if ring else ("all_gather", kv * cp, 1)))
    scattered = Exchange("their gradients", "reduce_scatter", kv * cp, 1)
    if program == "fused":
        return (ahead,), (ahead, Exchange("their gradients", "send", kv, cp - 1) if ring else scattered)
    if ring or program == "torchtitan":
        return (ahead,), (ahead, Exchange("their gradients", "send", kv * 4 // width, cp))
    return (ahead,), (scattered,)


def _context_parallel(plan: CommunicationPlan, layer: Layer, groups: Groups, calls: int) -> Iterator[Collective]:
    """Keys and values of every softmax attention, and their gradients; what is sent on from rank to rank hides behind attention."""
    tokens, width = plan.sequences * (plan.seq // plan.cp), RECIPES[plan.recipe].compute
    far = groups.context._replace(
        stride=plan.tp * (plan.cp - 1)
    )  # from the last rank to the first, which the others wait for
    for mixer in layer.mixers:
        if isinstance(mixer, Recurrence):
            continue
        wide = mixer.head_dim + getattr(mixer, "v_head_dim", mixer.head_dim)
        kv, heads = (
            tokens * max(1, count // plan.tp) * wide * width
            for count in (mixer.num_key_value_heads, mixer.num_attention_heads)
        )
        ahead, back = context_exchanges(
            plan.context_exchange, plan.implementation, plan.cp, kv=kv, heads=heads, width=width
        )
        again = ahead if plan.recompute == "full" else ()
        for phase, found in (("forward", ahead), ("recomputed", again), ("backward", back)):
            for one in found:
                overlap: Overlap = "nothing" if one.kind != "send" else "forward" if phase == "forward" else "backward"
                group = far if one.kind == "send" else groups.context
                yield Collective(
                    f"{layer.kind}/{one.name}, {phase}", one.kind, group, one.bytes, calls * one.calls, overlap
                )


def _ends(spec: ModelSpec, plan: CommunicationPlan, stage: Stage, groups: Groups) -> Iterator[Collective]:
    """The embedding and the head, divided by vocabulary, and the loss over divided logits: its maximum, sum and target."""
    size, m = _activation(spec, plan), plan.microbatches
    divided = plan.sharded_sequence
    if stage.first:
        kind: Kind = "reduce_scatter" if divided else "all_reduce"
        yield Collective("embedding, forward", kind, groups.tensor, size, m)
        if divided:
            yield Collective("embedding, backward", "all_gather", groups.tensor, size, m)
    if stage.last and spec.has_head:
        if divided:
            yield Collective("head, forward", "all_gather", groups.tensor, size, m)
        yield Collective("head, backward", "reduce_scatter" if divided else "all_reduce", groups.tensor, size, m)
        yield Collective("loss", "all_reduce", groups.tensor, 4 * plan.sequences * (plan.seq // plan.cp), 3 * m)


def _sends(spec: ModelSpec, plan: CommunicationPlan, stage: Stage, groups: Groups) -> Iterator[Collective]:
    """Hidden states to the next stage and their gradients back, once a chunk and micro-batch."""
    if plan.pp == 1:
        return
    size = _activation(spec, plan) // (plan.tp if plan.sharded_sequence else 1)
    chunks = stage.virtual * plan.microbatches
    yield Collective("activations, forward", "send", groups.pipeline, size, chunks - stage.last * plan.microbatches)
    yield Collective("gradients, backward", "send", groups.pipeline, size, chunks - stage.begins * plan.microbatches)
