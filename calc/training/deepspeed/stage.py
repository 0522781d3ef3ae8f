"""DeepSpeed's engine around a transformers model on one device: its buffers as leaves, and its live parameters."""

from __future__ import annotations

from collections.abc import Iterator

from calc.breakdown import Component, Formula
from calc.training.autograd.segments import Constant, Segment
from calc.training.deepspeed.engine import SOURCE, URL, WIDTH, Engine
from calc.training.deepspeed.live_parameters import LiveParameters
from calc.training.deepspeed.settings import ZeroSettings
from calc.training.plan import TrainingPlan
from calc.training.states.recipes import OPTIMIZERS
from calc.training.states.sharding import Placed, StateKey
from calc.training.states.tensors import Tensors

_COPIES = {"fused": 0, "foreach": 1, "loop": 2}  # temporaries of AdamW on a flat shard, by PyTorch's kernel

SETTINGS = (  # the fields of a plan that are DeepSpeed's, by the names of its JSON
    "reduce_bucket_size",
    "contiguous_gradients",
    "overlap_comm",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
)


def settings_of(plan: TrainingPlan) -> ZeroSettings:
    """The plan's settings, with DeepSpeed's defaults for the rest."""
    given = {name: getattr(plan, name) for name in SETTINGS if getattr(plan, name) is not None}
    return ZeroSettings(stage=plan.zero, **given)


def engine_of(plan: TrainingPlan, groups: tuple[Placed, ...], key: StateKey) -> Engine:
    """The engine of a device with those groups."""
    sizes = [size for tensors, count in groups for size in _trained(tensors, key) * count]
    copies = _COPIES[plan.optimizer_kernel] if OPTIMIZERS[plan.optimizer].counts_on_device else 0
    return Engine(settings_of(plan), tuple(sizes), plan.shards, plan.microbatches, copies, plan.offload != "none")


def _trained(tensors: Tensors, key: StateKey) -> tuple[int, ...]:
    """Elements of each weight of a group that trains."""
    stored: dict[str, int] = {}
    for tensor in tensors.tensors:
        if any(rule.group == "gradients" for rule in key.rules(tensor)):
            stored[tensor.storage] = stored.get(tensor.storage, 0) + tensor.elements
    return tuple(stored.values())


def deepspeed_constants(plan: TrainingPlan, groups: tuple[Placed, ...], key: StateKey) -> Iterator[Constant]:
    """The engine's buffers, each with the phase in which it is there."""
    found = engine_of(plan, groups, key).bytes()
    rows = (("zero_buffers", found.always, "step"), ("zero_buckets", found.backward, "backward"))
    for name, value, until in (*rows, ("zero_step", found.step, "end")):
        if value:
            formula = Formula(
                "<x>", SOURCE, URL, ("x: bytes of the engine's buffers; sizes of its JSON count elements",)
            )
            yield Constant(Component(name, value, formula=formula, numbers={"x": value}), False, until, fixed=True)


def partition_bytes(plan: TrainingPlan, groups: tuple[Placed, ...], key: StateKey) -> int:
    """The flat shard into which the gradients of the micro-batch that runs are copied."""
    return engine_of(plan, groups, key).bytes().partition


def live_parameters(plan: TrainingPlan, segments: tuple[Segment, ...]) -> LiveParameters:
    """The whole weights of ZeRO-3; nothing below it."""
    ranks = plan.shards if plan.zero == 3 else 1
    sizes = tuple(_weights(segment.tensors) for segment in segments)
    return LiveParameters(settings_of(plan), sizes, ranks, plan.recompute == "full", WIDTH)


def _weights(tensors: Tensors) -> tuple[int, ...]:
    stored: dict[str, int] = {}
    for tensor in tensors.tensors:
        size = tensor.elements // 4 if tensor.quantised else tensor.elements  # 4 bits each of a 16-bit number
        stored[tensor.storage] = stored.get(tensor.storage, 0) + size
    return tuple(stored.values())
