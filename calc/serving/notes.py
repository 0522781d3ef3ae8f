"""What the reader of a serving answer must know about its figures."""

from __future__ import annotations

from calc.hardware import Gpu
from calc.model.mixers import Mixer, Recurrence
from calc.model.spec import ModelSpec
from calc.serving.capacity import Capacity
from calc.serving.llama_cpp.host_memory import HostMemory
from calc.serving.plan import ServingPlan
from calc.serving.speed.roofline import Speed
from calc.serving.stages import Load
from calc.serving.weights import StoredWeights
from calc.units import GiB


def notes_of(
    spec: ModelSpec,
    plan: ServingPlan,
    gpu: Gpu | None,
    pace: Speed,
    stored: StoredWeights,
    host: HostMemory,
    capacity: Capacity,
    stages: tuple[Load, ...],
) -> tuple[str, ...]:
    """All remarks: on the model and its times, on the engine, on layers of the host, and on what is missing."""
    return (
        *spec.notes,
        *pace.notes,
        *_tied_head(spec, stored),
        *_general(spec, plan, gpu, pace),
        *_engine(spec, plan, gpu),
        *_placed(spec, plan, host),
        *_missing(plan, capacity, stages),
    )


def declared_cache(spec: ModelSpec) -> str:
    """The format that the checkpoint declares for its cache; "" for none."""
    return (spec.quantization.kv_dtype if spec.quantization else "") or ""


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


def _general(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, pace: Speed) -> list[str]:
    """What the reader must know about the figures."""
    notes: list[str] = []
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
    if plan.dp > 1:
        notes.append(
            f"each of the {plan.dp} data-parallel ranks serves its own requests: the cache's figures are of one rank"
        )
    if pace.ttft_s is not None and pace.source == "roofline":
        notes.append("times are a roofline: no communication, launches or scheduling")
    return notes


def _engine(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None) -> list[str]:
    """What the engine does with this model or on this card."""
    notes = []
    if plan.engine == "vllm" and any(tower.name == "picture_layers" for tower in spec.towers):
        notes.append(
            "vLLM has this class from 0.6 to 0.10 alone, and profiles its encoder on a picture of all tiles for each of max_seqs "
            "sequences: lower --max-seqs to leave room. A log of 128 sequences of the base model, whose tiles have 448 pixels a side where "
            "the instruct model's have 560, says 36.63 GiB (vllm#12126)"
        )
    if plan.engine == "llama.cpp" and (declared := declared_cache(spec)) and plan.kv_dtype == "fp16":
        notes.append(
            f"the checkpoint declares its cache in {declared}, which llama.cpp does not have: its f16 is counted"
        )
    if plan.engine == "llama.cpp" and (plan.cache_type_k or plan.cache_type_v):
        notes.append("the times read keys and values in the cache's one format (kv_dtype)")
    if plan.n_cpu_moe:
        notes.append(
            f"the experts of the first {plan.n_cpu_moe} layers compute on the host, and the times here do not show it"
        )
    if plan.engine == "vllm" and plan.images != 0 and any(tower.name == "audio" for tower in spec.towers):
        notes.append(
            "of the audio encoder the weights are counted; what the profile's pass over sounds takes is not computed"
        )
    if plan.engine == "vllm" and gpu and plan.weights == "fp8" and gpu.lacks("fp8"):
        notes.append(f"{gpu.lacks('fp8')}: vLLM keeps the weights in fp8 and computes in 16 bits (Marlin, weight-only)")
    if plan.engine == "vllm" and any(_keeps_fp32(mixer) for kind in spec.layers.kinds for mixer in kind.mixers):
        notes.append(
            "recurrent states are counted in fp32, as transformers keeps them; vLLM keeps most in the model's format unless "
            "the config or --mamba-ssm-cache-dtype says float32 (vllm/model_executor/layers/mamba/mamba_utils.py)"
        )
    return notes


def _placed(spec: ModelSpec, plan: ServingPlan, host: HostMemory) -> list[str]:
    """Where an engine keeps layers on the host, in a sentence."""
    total = spec.num_hidden_layers + 1
    if host.gpu_layers is None or host.gpu_layers >= total:
        return []
    return [
        f"{host.gpu_layers} of {total} layers (the output is one of them) are on the GPU; the rest computes on the host, and the "
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
