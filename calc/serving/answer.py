"""The `serve` answer: weights, cache and activations on one GPU, how much fits, and how fast it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from calc.breakdown import Breakdown, Component, unique_names
from calc.errors import InputError
from calc.hardware import Gpu
from calc.model.mixers import Attention, LatentAttention
from calc.model.spec import ModelSpec
from calc.serving.cache import Cache, cache_of
from calc.serving.capacity import Capacity
from calc.serving.engines import ENGINES
from calc.serving.formats import weight_format
from calc.serving.llama_cpp import HostMemory, host_memory
from calc.serving.notes import declared_cache, notes_of
from calc.serving.plan import ServingPlan, check_layout
from calc.serving.speed.estimate import speed
from calc.serving.speed.roofline import Speed
from calc.serving.stages import Load, Placement, loads
from calc.serving.vllm.extras import draft_layers
from calc.serving.vllm.startup_lines import startup_lines
from calc.serving.vllm.versions import TOPICS, version
from calc.serving.weights import StoredWeights, stored_weights
from calc.units import ceil_div


@dataclass(frozen=True, slots=True)
class ServingAnswer:
    """Bytes on one GPU of the stage that carries the most; `capacity` is that of the stage with the least room.

    `kv_bytes` is the cache of all sequences. `blocks_per_sequence` and `wasted_slots` are PagedAttention's for one sequence of
    `context` tokens. `mha_ratio`: the growing cache if every query head had its own keys and values, over this one.
    `saved_flops_per_step`: what projecting all keys and values anew in each step would cost.
    """

    spec: ModelSpec
    plan: ServingPlan
    gpu: Gpu | None
    breakdown: Breakdown
    stage: int
    format: str
    weights_bytes: int
    kv_bytes_per_token: int
    kv_fixed_bytes: int
    kv_bytes_per_sequence: int
    kv_bytes: int
    activation_bytes: int
    reserved: tuple[Component, ...]
    host: HostMemory
    blocks_per_sequence: int
    wasted_slots: int
    mha_ratio: float | None
    saved_flops_per_step: int
    capacity: Capacity
    speed: Speed
    notes: tuple[str, ...]

    @property
    def startup_lines(self) -> tuple[str, ...]:
        """What the engine prints at start-up, with these figures; () for an engine whose lines are not written here."""
        if self.plan.engine != "vllm":
            return ()
        reserved = {part.name: int(part.total) for part in self.reserved}
        memory = self.gpu.memory_bytes if self.gpu else None
        return startup_lines(self.plan, memory, self.weights_bytes, self.activation_bytes, reserved, self.capacity)

    @property
    def constants(self) -> list[dict[str, Any]]:
        """The engine's constants at this version, each with its first version and its source; [] where it has no table."""
        if self.plan.engine != "vllm":
            return []
        at = [(topic, topic.at(version(self.plan.engine_version))) for topic in TOPICS]
        return [
            {
                "name": topic.name,
                "meaning": topic.meaning,
                "value": change.value,
                "since": ".".join(map(str, change.since)),
                "source": change.source,
            }
            for topic, change in at
        ]

    def as_json(self) -> dict[str, Any]:
        """The answer with the keys of `python -m calc serve`."""
        return {
            "model": self.spec.name,
            "gpu": self.gpu.name if self.gpu else None,
            "gpu_memory_bytes": self.gpu.memory_bytes if self.gpu else None,
            "engine": self.plan.engine,
            "stage": self.stage,
            "format": self.format,
            "kv_dtype": self.plan.kv_dtype,
            "weights_bytes": self.weights_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_fixed_bytes": self.kv_fixed_bytes,
            "kv_bytes_per_sequence": self.kv_bytes_per_sequence,
            "kv_bytes": self.kv_bytes,
            "activation_bytes": self.activation_bytes,
            "reserved_bytes": {part.name: int(part.total) for part in self.reserved},
            "host_weights_bytes": self.host.weights,
            "host_kv_bytes": self.host.state,
            "gpu_layers": self.host.gpu_layers,
            "kv_budget_bytes": self.capacity.budget,
            "kv_blocks": self.capacity.blocks,
            "kv_tokens": self.capacity.tokens,
            "max_concurrency": self.capacity.concurrency,
            "fits": self.capacity.fits,
            "blocks_per_sequence": self.blocks_per_sequence,
            "wasted_slots": self.wasted_slots,
            "mha_ratio": self.mha_ratio,
            "saved_flops_per_step": self.saved_flops_per_step,
            "ttft_s": self.speed.ttft_s,
            "tpot_s": self.speed.tpot_s,
            "tokens_per_s": self.speed.tokens_per_s,
            "bound": self.speed.bound,
            **self.speed.as_json(),
            "startup_lines": list(self.startup_lines),
            "constants": self.constants,
            "components": self.breakdown.components(),
            "assumptions": list(self.spec.assumptions),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class _Memory:
    """The bytes of a plan, before they are laid out: its formats settled, weights, cache, the load of each stage, and the room."""

    plan: ServingPlan
    stored: StoredWeights
    cache: Cache
    placement: Placement | None
    stages: tuple[Load, ...]
    capacity: Capacity


def _memory(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None) -> _Memory:
    if plan.engine not in ENGINES:
        raise InputError.of("engine", plan.engine, f"the engines whose rules are known here: {', '.join(ENGINES)}")
    spec.must_read_text()
    check_layout(spec, plan)
    plan = _settled(spec, plan)
    stored = stored_weights(spec, plan.weights, plan.tp, plan.dp)
    cache = cache_of(spec, plan)
    engine = ENGINES[plan.engine]
    placement = engine.place(spec, plan, gpu, stored, cache) if engine.place else None
    drafted = draft_layers(spec, plan) if plan.engine == "vllm" else 0
    stages = loads(spec, plan, gpu, stored, cache, engine.parts, placement, drafted)
    return _Memory(plan, stored, cache, placement, stages, engine.capacity(plan, gpu, cache, stages))


def capacity_of(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None = None) -> Capacity:
    """What fits, without the breakdown and the times of `serve`. InputError as there."""
    return _memory(spec, plan, gpu).capacity


def serve(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None = None) -> ServingAnswer:
    """Memory and speed of serving a model.

    The budget of the cache is GPU memory x utilisation - weights - activations, unless `plan.kv_memory_gib` states it. InputError
    when the layout does not divide the model, or for an engine whose rules are not known here.
    """
    memory = _memory(spec, plan, gpu)
    plan, stored, cache, placement = memory.plan, memory.stored, memory.cache, memory.placement
    stages, capacity = memory.stages, memory.capacity
    host = host_memory(spec, plan, stored, cache, placement)
    most = max(stages, key=lambda load: load.total(plan.streams))
    block = capacity.block_size or plan.block_size
    cached = plan.context if spec.generates else 0
    blocks = ceil_div(cached, block)
    pace = speed(spec, plan, gpu, stored, cache, capacity)
    return ServingAnswer(
        spec=spec,
        plan=plan,
        gpu=gpu,
        breakdown=Breakdown(_tree(spec, plan, _held(plan, stored, most, placement), cache, most), "bytes"),
        stage=most.stage,
        format=stored.format.label,
        weights_bytes=most.weights,
        kv_bytes_per_token=cache.token_bytes(most.counts),
        kv_fixed_bytes=cache.fixed_bytes(most.counts),
        kv_bytes_per_sequence=most.sequence,
        kv_bytes=plan.streams * most.sequence,
        activation_bytes=most.activation_bytes,
        reserved=most.reserved,
        host=host,
        blocks_per_sequence=capacity.request_blocks or blocks,
        wasted_slots=blocks * block - cached,
        mha_ratio=mha_ratio(spec) if spec.generates else None,
        saved_flops_per_step=plan.concurrency * saved_flops(spec, cached),
        capacity=capacity,
        speed=pace,
        notes=notes_of(spec, plan, gpu, pace, stored, host, capacity, stages),
    )


def _settled(spec: ModelSpec, plan: ServingPlan) -> ServingPlan:
    """The plan with the formats that "auto" stands for: what the checkpoint declares, bf16 where it declares none; llama.cpp's cache
    is in f16 whatever the checkpoint was (common.h, cache_type_k)."""
    found: dict[str, str] = {}
    if plan.weights == "auto":
        found["weights"] = weight_format(spec, "auto").name
    if plan.kv_dtype == "auto":
        found["kv_dtype"] = "fp16" if plan.engine == "llama.cpp" else declared_cache(spec) or "bf16"
    return plan.model_copy(update=found)


def _held(plan: ServingPlan, stored: StoredWeights, load: Load, placement: Placement | None) -> tuple[Component, ...]:
    """The weights of a stage."""
    return placement.weights(load.layers) if placement else stored.stage(load.layers, plan.pp)


def _tree(spec: ModelSpec, plan: ServingPlan, weights: tuple[Component, ...], cache: Cache, load: Load) -> Component:
    """weights, state and activations of one GPU; the state once for each sequence."""
    kinds = cache.components(spec, load.counts)
    if len(kinds) == 1:
        kinds = (Component("layers", children=kinds[0].children, count=kinds[0].count),)
    parts = (
        Component("weights", children=weights),
        Component("state", children=unique_names(kinds), count=plan.streams),
        Component("activations", children=load.activations),
    )
    return Component("serving", children=tuple(part for part in parts if part.children))


def mha_ratio(spec: ModelSpec) -> float | None:
    """The growing cache of multi-head attention with these heads, over the model's own: 1 for MHA, a/k for GQA, a for MQA."""
    full = own = 0
    for kind, count in zip(spec.layers.kinds, spec.layers.counts, strict=True):
        mixer = kind.mixer
        if isinstance(mixer, Attention | LatentAttention) and mixer.causal:
            full += count * mixer.num_attention_heads * (mixer.head_dim + mixer.v_head_dim)
        if isinstance(mixer, Attention) and mixer.causal and not mixer.shares_kv:
            own += count * mixer.num_key_value_heads * (mixer.head_dim + mixer.v_head_dim)
        elif isinstance(mixer, LatentAttention) and mixer.causal:
            own += count * (mixer.kv_lora_rank + mixer.qk_rope_head_dim)
    return full / own if own else None


_PROJECTIONS = frozenset(("key", "value", "key_value_down", "key_value_up"))


def saved_flops(spec: ModelSpec, tokens: int) -> int:
    """FLOPs of projecting the keys and values of so many tokens: what a step without a cache would repeat."""
    weights = sum(
        count * weight.parameters
        for parts, count in zip(spec.layers.kind_parts, spec.layers.counts, strict=True)
        for part in parts
        for weight in part.weights
        if part.name == "attention" and weight.name in _PROJECTIONS and weight.matmul
    )
    return 2 * tokens * weights
