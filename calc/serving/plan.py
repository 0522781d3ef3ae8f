"""What to serve and how: the layout, the engine, the formats, and the load."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from calc.errors import InputError
from calc.model.spec import ModelSpec
from calc.serving.speed.options import SpeedOptions

MOST_TOKENS = 2**24

WeightName = Literal[
    "auto",
    "bf16",
    "fp16",
    "fp32",
    "fp8",
    "int8",
    "gptq-int4",
    "awq-int4",
    "nf4",
    "mxfp4",
    "nvfp4",
    "mlx-int8",
    "mlx-int4",
    "gguf-BF16",
    "gguf-F16",
    "gguf-Q8_0",
    "gguf-Q6_K",
    "gguf-Q5_K_M",
    "gguf-Q5_K_S",
    "gguf-Q5_1",
    "gguf-Q5_0",
    "gguf-Q4_K_M",
    "gguf-Q4_K_S",
    "gguf-Q4_1",
    "gguf-Q4_0",
    "gguf-IQ4_NL",
    "gguf-IQ4_XS",
    "gguf-MXFP4_MOE",
    "gguf-Q3_K_L",
    "gguf-Q3_K_M",
    "gguf-Q3_K_S",
    "gguf-IQ3_M",
    "gguf-IQ3_S",
    "gguf-IQ3_XS",
    "gguf-IQ3_XXS",
    "gguf-Q2_K",
    "gguf-Q2_K_S",
    "gguf-IQ2_M",
    "gguf-IQ2_S",
    "gguf-IQ2_XS",
    "gguf-IQ2_XXS",
    "gguf-IQ1_M",
    "gguf-IQ1_S",
]
EngineName = Literal["logical", "vllm", "sglang", "tensorrt-llm", "llama.cpp", "mlx", "transformers"]
KVName = Literal["auto", "bf16", "fp16", "fp32", "fp8", "int8", "int4", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


def _zero_is_auto(value: Any) -> Any:
    """0 stood for "auto" in older links and commands, and still does."""
    return None if value in (0, "0", "0.0") and value is not False else value


def _numbers(text: str | None) -> tuple[Fraction, ...]:
    return tuple(map(Fraction, text.split(","))) if text else ()


def _are_numbers(text: str | None) -> str | None:
    if text is not None and not re.fullmatch(r"\d{1,6}(\.\d{1,6})?(,\d{1,6}(\.\d{1,6})?)*", text):
        raise ValueError("it must be numbers with commas between them, as 3,1")
    return text


_Numbers = Annotated[str | None, AfterValidator(_are_numbers)]
_AutoCount = Annotated[int | None, BeforeValidator(_zero_is_auto)]
_AutoGiB = Annotated[float | None, BeforeValidator(_zero_is_auto)]


_ENGINE_FIELDS = {
    "engine_version": ("vllm",),
    "ep": ("vllm", "sglang", "tensorrt-llm"),
    "poll_steps": ("sglang",),
    "gather_steps": ("tensorrt-llm",),
    "stream_steps": ("tensorrt-llm",),
    "moe_backend": ("tensorrt-llm",),
    "enforce_eager": ("vllm",),
    "images": ("vllm",),
    "lora_slots": ("vllm", "sglang"),
    "lora_rank": ("vllm", "sglang"),
    "draft": ("vllm",),
    "async_scheduling": ("vllm",),
    "prefix_caching": ("vllm", "sglang"),
    "non_torch_gib": ("vllm",),
    "overhead_gib": ("vllm",),
    "cuda_graph_gib": ("vllm",),
    "activation_gib": ("vllm", "llama.cpp"),
    "mem_fraction_static": ("sglang",),
    "free_gpu_memory_fraction": ("tensorrt-llm",),
    "max_tokens": ("tensorrt-llm",),
    "gpu_memory_utilization": ("logical", "vllm", "llama.cpp", "mlx"),
    "ubatch": ("llama.cpp",),
    "gpu_layers": ("llama.cpp",),
    "flash_attention": ("llama.cpp",),
    "cache_type_k": ("llama.cpp",),
    "cache_type_v": ("llama.cpp",),
    "kv_unified": ("llama.cpp",),
    "tensor_split": ("llama.cpp",),
    "gpu_memories": ("llama.cpp",),
    "n_cpu_moe": ("llama.cpp",),
}


class ServingPlan(SpeedOptions):
    """How a model is served. Bytes are per GPU, for the pipeline stage that needs the most."""

    engine: EngineName = Field("logical", description="whose rules: logical is the bytes of the tensors alone")
    engine_version: str | None = Field(
        None, max_length=20, description="the engine's version, as 0.19; left out: the newest that is known here"
    )
    tp: int = Field(1, ge=1, le=4096, description="tensor parallelism")
    pp: int = Field(1, ge=1, le=4096, description="pipeline stages")
    dp: int = Field(1, ge=1, le=4096, description="data-parallel attention: ranks that hold attention whole")
    ep: int = Field(
        1, ge=1, le=4096, description="expert parallelism: tp x dp (vLLM, SGLang), 1, or between (TensorRT-LLM)"
    )
    weights: WeightName = Field(
        "auto", description="format of the weights; auto: as the checkpoint declares, bf16 where it does not"
    )
    kv_dtype: KVName = Field(
        "auto", description="format of the KV cache; auto: as the checkpoint declares, bf16 where it does not"
    )
    context: int = Field(4096, ge=1, le=MOST_TOKENS, description="tokens of one sequence in the cache")
    concurrency: int = Field(
        1, ge=1, le=1_000_000, description="concurrent requests: sequences that have a cache at the same time"
    )
    prompt: _AutoCount = Field(
        None, ge=1, le=MOST_TOKENS, description="prompt tokens; left out: the context without the output"
    )
    output: _AutoCount = Field(
        None, ge=1, le=MOST_TOKENS, description="tokens to generate after the prompt; left out: one"
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of the GPU's memory that weights, cache and activations may take; left out: the engine's own (vLLM 0.92)",
    )
    kv_memory_gib: _AutoGiB = Field(
        None, ge=0, le=1_000_000, description="GiB for the KV cache, where known; left out: what the GPU has left"
    )
    block_size: int = Field(16, ge=1, le=65536, description="tokens of a cache block (PagedAttention)")
    max_batched_tokens: _AutoCount = Field(
        None, ge=1, le=MOST_TOKENS, description="most tokens of one step; left out: the engine's default for the GPU"
    )
    max_seqs: _AutoCount = Field(
        None, ge=1, le=1_000_000, description="most sequences of one step; left out: the engine's default for the GPU"
    )
    enforce_eager: bool = Field(False, description="vLLM: capture no CUDA graphs")
    images: int | None = Field(
        None, ge=0, le=1_000, description="vLLM: pictures of a request; 0: none, and no profile of the encoder"
    )
    async_scheduling: bool | None = Field(
        None, description="vLLM: two batches in flight; left out: as its version does (on from 0.25)"
    )
    prefix_caching: bool = Field(
        True,
        description="keep prefixes; a recurrent layer then holds more states a request (vLLM two blocks, SGLang five slots)",
    )
    lora_slots: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="vLLM, SGLang: adapters that may serve at once (max_loras, max_loras_per_batch); left out: LoRA is off",
    )
    lora_rank: int = Field(
        16, ge=1, le=1024, description="vLLM, SGLang: the largest rank of an adapter (max_lora_rank)"
    )
    draft: Literal["none", "ngram", "eagle", "mtp"] = Field(
        "none", description="vLLM: who drafts for speculative decoding, with its weights and cache"
    )
    overhead_gib: float | None = Field(
        None,
        ge=0,
        le=1000,
        description="GiB besides weights, cache and activations, in all; left out: what the engine's version is known to take",
    )
    activation_gib: float | None = Field(
        None, ge=0, le=1000, description="GiB of the highest point of a step, where a log says so; left out: computed"
    )
    non_torch_gib: float | None = Field(
        None,
        ge=0,
        le=1000,
        description="vLLM: GiB outside torch's allocator, where a log says so; left out: its version's",
    )
    cuda_graph_gib: float | None = Field(
        None, ge=0, le=1000, description="GiB of CUDA graphs, where a log says so; left out: an estimate by their sizes"
    )
    mem_fraction_static: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="SGLang: share of the memory for weights and cache; left out: by its rule for the GPU",
    )
    free_gpu_memory_fraction: float | None = Field(
        None, gt=0, le=1, description="TensorRT-LLM: share of the free memory for the cache; left out: 0.9"
    )
    max_tokens: int | None = Field(
        None, ge=1, le=10**12, description="TensorRT-LLM: most tokens of the cache; left out: no limit"
    )
    ubatch: int = Field(512, ge=1, le=65536, description="llama.cpp: tokens computed at once (n_ubatch)")
    gpu_layers: Annotated[int, Field(ge=0, le=10_000)] | Literal["auto"] | None = Field(
        None,
        description="llama.cpp: layers on the GPU, the output is one of them (-ngl); auto: as many as fit; left out: all",
    )
    cache_type_k: KVName | None = Field(None, description="llama.cpp: format of the keys (-ctk); left out: as kv_dtype")
    cache_type_v: KVName | None = Field(
        None, description="llama.cpp: format of the values (-ctv); left out: as kv_dtype"
    )
    kv_unified: bool = Field(
        False, description="llama.cpp: all sequences share one cache of `context` tokens (-kvu); off: each has its own"
    )
    tensor_split: _Numbers = Field(
        None,
        max_length=200,
        description="llama.cpp: shares of the layers for each of pp GPUs, as 3,1 (-ts); left out: by their memory",
    )
    gpu_memories: _Numbers = Field(
        None,
        max_length=200,
        description="llama.cpp: GiB of each of pp GPUs where they differ, as 24,12; the layers are shared out by them",
    )
    n_cpu_moe: int | None = Field(
        None,
        ge=1,
        le=10_000,
        description="llama.cpp: layers, from the first on, whose experts stay on the host (-ncmoe)",
    )
    flash_attention: bool = Field(True, description="llama.cpp: compute attention without keeping its scores (-fa)")
    keep_window: _AutoCount = Field(
        None, ge=1, le=MOST_TOKENS, description="StreamingLLM: keep only the last so many tokens; left out: keep all"
    )
    keep_sinks: _AutoCount = Field(
        None, ge=1, le=MOST_TOKENS, description="StreamingLLM: first tokens kept next to the window (the paper keeps 4)"
    )
    compute_efficiency: float = Field(
        1.0, gt=0, le=1, description="share of the dense peak that prefill reaches; 1: roofline"
    )
    bandwidth_efficiency: float = Field(
        1.0, gt=0, le=1, description="share of the memory bandwidth that decode reaches; 1: roofline"
    )

    @model_validator(mode="after")
    def _prompt_and_output_fit(self) -> ServingPlan:
        prompt, output = self.prompt or 0, self.output_tokens
        if prompt + output > self.context:
            raise ValueError(f"prompt ({prompt}) + output ({output}) must be at most context ({self.context})")
        if self.tp * self.dp % self.ep:
            raise ValueError(f"ep ({self.ep}) must divide tp x dp ({self.tp} x {self.dp})")
        if self.keep_sinks and not self.keep_window:
            raise ValueError(f"keep_sinks ({self.keep_sinks}) needs a keep_window; it is left out")
        for name, least in (("tensor_split", max), ("gpu_memories", min)):
            shares, given = _numbers(getattr(self, name)), getattr(self, name)
            if shares and (len(shares) != self.pp or not least(shares)):
                which = "one" if least is max else "each"
                raise ValueError(
                    f"{name} ({given}) must have a number for each of pp ({self.pp}) GPUs, {which} above 0"
                )
        return self

    @property
    def splits(self) -> tuple[Fraction, ...]:
        """The share of each GPU in the layers: as given, or its memory's."""
        return _numbers(self.tensor_split) or self.memories_gib or (Fraction(1),) * self.pp

    @property
    def memories_gib(self) -> tuple[Fraction, ...]:
        """GiB of each GPU, where they differ."""
        return _numbers(self.gpu_memories)

    @property
    def streams(self) -> int:
        """How many caches of `context` tokens there are: one for each sequence, or one for all."""
        return 1 if self.kv_unified and self.engine == "llama.cpp" else self.concurrency

    @property
    def idle(self) -> dict[str, str]:
        """Fields that were given and that the engine does not have, each with the reason."""
        return {
            name: f"it is for {' and '.join(engines)}; the engine is {self.engine}"
            for name, engines in _ENGINE_FIELDS.items()
            if self.engine not in engines and name in self.model_fields_set
        }

    def utilization(self, default: float) -> float:
        """The share of the memory that may be used: as given, or the engine's default."""
        return default if self.gpu_memory_utilization is None else self.gpu_memory_utilization

    @property
    def prompt_tokens(self) -> int:
        """The prompt: as given, or what the output leaves of the context."""
        return self.prompt or max(1, self.context - self.output_tokens)

    @property
    def output_tokens(self) -> int:
        """Tokens after the prompt: as given, or none where the plan names none."""
        return self.output or 0


def check_layout(spec: ModelSpec, plan: ServingPlan) -> None:
    """InputError unless heads, KV heads and layers divide as the layout asks."""
    for kind in spec.layers.kinds:
        heads = getattr(kind.mixer, "num_attention_heads", None)
        kv = getattr(kind.mixer, "num_key_value_heads", None)
        if heads and heads % plan.tp:
            raise InputError(f"tp ({plan.tp}) must divide num_attention_heads ({heads})", "tp")
        if kv and kv % plan.tp and plan.tp % kv:
            raise InputError(f"tp ({plan.tp}) must divide num_key_value_heads ({kv}), or be a multiple of it", "tp")
    spec.refuse_stages(plan.pp)
    if plan.pp > spec.num_hidden_layers:
        raise InputError(f"pp ({plan.pp}) must be at most num_hidden_layers ({spec.num_hidden_layers})", "pp")
