"""The `serve` answer: weights, cache and activations on one GPU, how much fits, and how fast it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from calc.breakdown import Breakdown, Component, unique_names
from calc.errors import InputError
from calc.hardware import Gpu
from calc.model.mixers import Attention, LatentAttention, Mixer, Recurrence
from calc.model.spec import ModelSpec
from calc.serving.cache import Cache, cache_of
from calc.serving.capacity import Capacity
from calc.serving.engines import ENGINES
from calc.serving.formats import weight_format
from calc.serving.llama_cpp import host_counts, host_weights
from calc.serving.plan import ServingPlan, check_layout
from calc.serving.speed.estimate import speed
from calc.serving.speed.roofline import Speed
from calc.serving.stages import Load, Placement, loads
from calc.serving.vllm.extras import draft_layers
from calc.serving.vllm.startup_lines import startup_lines
from calc.serving.vllm.versions import TOPICS, version
from calc.serving.weights import StoredWeights, stored_weights
from calc.units import GiB, ceil_div


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What an engine keeps in host memory: bytes of weights and of all sequences' cache. `gpu_layers` are those on GPUs, the output
    among them; None where the engine has no choice."""

    weights: int = 0
    state: int = 0
    gpu_layers: int | None = None


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
    most = max(stages, key=lambda load: load.total(plan.concurrency))
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
        kv_bytes=plan.concurrency * most.sequence,
        activation_bytes=most.activation_bytes,
        reserved=most.reserved,
        host=host,
        blocks_per_sequence=capacity.request_blocks or blocks,
        wasted_slots=blocks * block - cached,
        mha_ratio=mha_ratio(spec) if spec.generates else None,
        saved_flops_per_step=plan.concurrency * saved_flops(spec, cached),
        capacity=capacity,
        speed=pace,
        notes=(*_notes(spec, plan, gpu, pace, stored), *_placed(spec, plan, host), *_missing(plan, capacity, stages)),
    )


def _settled(spec: ModelSpec, plan: ServingPlan) -> ServingPlan:
    """The plan with the formats that "auto" stands for: what the checkpoint declares, bf16 where it declares none."""
    found: dict[str, str] = {}
    if plan.weights == "auto":
        found["weights"] = weight_format(spec, "auto").name
    if plan.kv_dtype == "auto":
        found["kv_dtype"] = (spec.quantization.kv_dtype if spec.quantization else "") or "bf16"
    return plan.model_copy(update=found)


def host_memory(
    spec: ModelSpec, plan: ServingPlan, stored: StoredWeights, cache: Cache, placement: Placement | None
) -> HostMemory:
    """What stays in host memory where the engine places layers itself."""
    if placement is None:
        return HostMemory()
    weights = sum(part.total for part in host_weights(spec, plan, stored, placement.layers))
    counts = host_counts(spec, placement.layers)
    on_gpu = spec.num_hidden_layers - sum(counts)
    state = plan.concurrency * cache.sequence_bytes(counts, plan.context)
    return HostMemory(int(weights), state, on_gpu + (plan.gpu_layers != 0))


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
        Component("state", children=unique_names(kinds), count=plan.concurrency),
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


def _tied_head(spec: ModelSpec, stored: StoredWeights) -> list[str]:
    """That published GPTQ and AWQ checkpoints of a tied model store the head again, and the bytes of it."""
    own = stored.format.quantization
    if not (spec.tied and spec.has_head and own and own.family in ("awq-int4", "gptq-int4") and stored.head_copy):
        return []
    again = int(sum(part.total for part in stored.head_copy))
    return [
        f"the head is tied to the embedding and held once; published checkpoints of this format often store it again: "
        f"{again:,} bytes more"
    ]


def _notes(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, pace: Speed, stored: StoredWeights) -> list[str]:
    """What the reader must know about the figures."""
    notes = [*spec.notes, *pace.notes, *_tied_head(spec, stored)]
    if not spec.generates:
        notes.append(
            f"{spec.architecture} is an encoder and generates nothing: no cache, and no tokens a second; "
            "ttft_s is one pass over the prompt"
        )
        notes += [
            f"of {tower.name} the weights alone are counted: the pass is that of the text" for tower in spec.towers
        ]
    if gpu is None:
        notes.append("no GPU chosen: what fits, and how fast, is left out")
    elif gpu.memory_bytes is None:
        notes.append(f"no source gives the memory of {gpu.name}")
    elif gpu.memory_is_estimate:
        notes.append(f"memory of {gpu.name}: {gpu.memory_note}")
    notes += spec.beyond_positions("context", plan.context)
    if plan.engine == "vllm" and any(tower.name == "picture_layers" for tower in spec.towers):
        notes.append(
            "vLLM has this class from 0.6 to 0.10 alone, and profiles its encoder on a picture for each of max_seqs sequences, whose peak "
            "is not computed here: a log of 128 sequences says 36.63 GiB (vllm#12126); state yours by --activation-gib"
        )
    if plan.engine == "vllm" and gpu and plan.weights == "fp8" and gpu.lacks("fp8"):
        notes.append(f"{gpu.lacks('fp8')}: vLLM keeps the weights in fp8 and computes in 16 bits (Marlin, weight-only)")
    if plan.dp > 1:
        notes.append(
            f"each of the {plan.dp} data-parallel ranks serves its own requests: the cache's figures are of one rank"
        )
    if plan.engine == "vllm" and any(_keeps_fp32(mixer) for kind in spec.layers.kinds for mixer in kind.mixers):
        notes.append(
            "recurrent states are counted in fp32, as transformers keeps them; vLLM keeps most in the model's format unless "
            "the config or --mamba-ssm-cache-dtype says float32 (vllm/model_executor/layers/mamba/mamba_utils.py)"
        )
    if pace.ttft_s is not None and pace.source == "roofline":
        notes.append("times are a roofline: no communication, launches or scheduling")
    return notes


def _placed(spec: ModelSpec, plan: ServingPlan, host: HostMemory) -> list[str]:
    """Where an engine keeps layers on the host, in a sentence."""
    total = spec.num_hidden_layers + 1
    if host.gpu_layers is None or host.gpu_layers >= total:
        return []
    return [
        f"{host.gpu_layers} of {total} layers (the output counted as one) are on the GPU; the rest computes on the host, and the "
        "times here do not show it"
    ]


def _missing(plan: ServingPlan, capacity: Capacity, stages: tuple[Load, ...]) -> list[str]:
    """How much is missing where weights, activations and reserve alone are too much, in the engine's own words where it has some."""
    if capacity.limit is None or plan.kv_memory_gib is not None:
        return []
    short = max(load.total(0) for load in stages) - capacity.limit
    if short < 0:
        return []
    words = "No available memory for the cache blocks: " if plan.engine == "vllm" else ""
    return [f"{words}{short / GiB:.2f} GiB are missing before the first token of the cache"]


def _keeps_fp32(mixer: Mixer) -> bool:
    return isinstance(mixer, Recurrence) and any(state.dtype == "fp32" for state in mixer.states)
