"""The lines that engines print at start-up, as patterns: which engine prints them, and what each group means.

A group `name` is a fact; its suffix says the unit: `_gib`, `_mib` and `_gb` (SGLang's and old vLLM's GB are GiB) become bytes, all
else stays text. `device` names where llama.cpp's buffer lies.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_N = r"(-?\d[\d,]*(?:\.\d+)?)"  # a number, with commas for thousands


class Pattern(NamedTuple):
    """A line of an engine: `marker` is a text that it must hold, looked for first; `adds` facts are summed over lines."""

    engine: str
    marker: str
    regex: re.Pattern[str]
    adds: bool = False


def _pattern(engine: str, marker: str, text: str, *, adds: bool = False) -> Pattern:
    return Pattern(
        engine, marker, re.compile(re.sub(r"(?<!\?P)<(\w+)>", lambda found: rf"(?P<{found[1]}>{_N[1:-1]})", text)), adds
    )


def _setting(engine: str, marker: str, key: str, fact: str, value: str = r"'?([\w./-]+)'?") -> Pattern:
    """`key=value` within the line of the engine's configuration."""
    return Pattern(engine, marker, re.compile(rf"\b{key}={value.replace('(', f'(?P<{fact}>', 1)}"))


_CONFIG = "LLM engine (v"
_ARGS = "ServerArgs("
PATTERNS = (
    _pattern("vllm", _CONFIG, r"LLM engine \(v(?P<version>\d+\.\d+)"),
    _pattern("vllm", "API server version", r"API server version:? v?(?P<version>\d+\.\d+)"),
    _setting("vllm", _CONFIG, "model", "model"),
    _setting("vllm", _CONFIG, "max_seq_len", "context", r"(\d+)"),
    _setting("vllm", _CONFIG, "tensor_parallel_size", "tp", r"(\d+)"),
    _setting("vllm", _CONFIG, "pipeline_parallel_size", "pp", r"(\d+)"),
    _setting("vllm", _CONFIG, "quantization", "quantization"),
    _setting("vllm", _CONFIG, "kv_cache_dtype", "kv_dtype"),
    _setting("vllm", _CONFIG, "enforce_eager", "eager", r"(True|False)"),
    _pattern("vllm", "max_num_batched_tokens=", r"max_num_batched_tokens=(?P<max_batched_tokens>\d+)"),
    _pattern("vllm", "odel", r"(?:Model loading|Loading model weights) took <weights_gib> ?Gi?B"),
    _pattern(
        "vllm", "total_gpu_memory (", r"total_gpu_memory \(<total_gib>GiB\) x gpu_memory_utilization \(<utilization>\)"
    ),
    _pattern(
        "vllm",
        "model weights take",
        r"model weights take <weights_gib>GiB; non_torch_memory takes <non_torch_gib>GiB; PyTorch activation peak memory takes "
        r"<activation_gib>GiB; the rest of the memory reserved for KV Cache is <kv_budget_gib>GiB",
    ),
    _pattern(
        "vllm",
        "total_gpu_memory=",
        r"total_gpu_memory=<total_gib>GiB .*peak_torch_memory=<torch_gib>GiB .*non_torch_memory=<non_torch_gib>GiB "
        r"kv_cache_size=<kv_budget_gib>GiB gpu_memory_utilization=<utilization>",
    ),
    _pattern(
        "vllm",
        "torch peak memory increase",
        r"torch peak memory increase: <activation_gib>GiB(?:; non-torch forward increase memory: <non_torch_gib>GiB)?"
        r".*weights memory: <weights_gib>GiB",
    ),
    _pattern(
        "vllm",
        "Free memory on device",
        r"Free memory on device \([\d.]+/<total_gib> GiB\) on startup\. Desired GPU memory utilization is \(<utilization>,",
    ),
    _pattern("vllm", "for peak activation", r"<activation_gib> GiB for peak activation"),
    _pattern("vllm", "for non-torch", r"<non_torch_gib> GiB for non-torch memory"),
    _pattern("vllm", "Available KV cache memory", r"Available KV cache memory: <kv_budget_gib> GiB"),
    _pattern("vllm", "GPU KV cache size", r"GPU KV cache size: <kv_tokens> tokens"),
    _pattern("vllm", " blocks: ", r"# (?:GPU|CUDA|cuda) blocks: <kv_blocks>"),
    _pattern(
        "vllm", "Maximum concurrency for", r"Maximum concurrency for <context> tokens per request: <concurrency>x"
    ),
    _pattern("vllm", "Graph capturing finished", r"Graph capturing finished in .*took <graphs_gib> GiB"),
    _pattern("sglang", _ARGS, r"ServerArgs\(model_path='(?P<model>[^']+)'"),
    _setting("sglang", _ARGS, "tp_size", "tp", r"(\d+)"),
    _setting("sglang", _ARGS, "pp_size", "pp", r"(\d+)"),
    _setting("sglang", _ARGS, "quantization", "quantization"),
    _setting("sglang", _ARGS, "kv_cache_dtype", "kv_dtype"),
    _setting("sglang", _ARGS, "mem_fraction_static", "mem_fraction", r"([\d.]+)"),
    _pattern("sglang", "Load weight end", r"Load weight end\..*mem usage=<weights_gib> GB"),
    _pattern(
        "sglang",
        "KV Cache is allocated",
        r"KV Cache is allocated\..*#tokens: <kv_tokens>,(?: K size: <keys_gib> GB, V size: <values_gib> GB)?"
        r"(?:.*KV size: <kv_budget_gib> GB)?",
    ),
    _pattern("sglang", "max_total_num_tokens=", r"max_total_num_tokens=<kv_tokens>,.*context_len=(?P<context>\d+)"),
    _pattern("sglang", "max_total_num_tokens=", r"chunked_prefill_size=(?P<max_batched_tokens>\d+)"),
    _pattern("sglang", "cuda graph end", r"[Cc]apture (?:decode )?cuda graph end.*mem usage=<graphs_gib> GB"),
    _pattern("tensorrt-llm", "TensorRT-LLM version", r"TensorRT-LLM version: v?(?P<version>\d+\.\d+)"),
    _pattern("tensorrt-llm", "[TensorRT-LLM]", r"Loaded engine size: <weights_mib> MiB"),
    _pattern(
        "tensorrt-llm",
        "paged KV cache (",
        r"Allocated <kv_budget_gib> GiB for max tokens in paged KV cache \(<kv_tokens>\)",
    ),
    _pattern("tensorrt-llm", "primary pool", r"blocks in KV cache primary pool: <kv_blocks>"),
    _pattern("tensorrt-llm", "tokens per block", r"tokens per block: (?P<block_size>\d+)"),
    _pattern("llama.cpp", "model buffer size", r"(?P<device>[\w-]+) model buffer size = +<weights_mib> MiB", adds=True),
    _pattern("llama.cpp", "KV buffer size", r"(?P<device>[\w-]+) KV buffer size = +<cache_mib> MiB", adds=True),
    _pattern("llama.cpp", "RS buffer size", r"(?P<device>[\w-]+) RS buffer size = +<cache_mib> MiB", adds=True),
    _pattern("llama.cpp", "compute buffer size", r"(?P<device>[\w-]+) +compute buffer size = +<activation_mib> MiB"),
    _pattern("llama.cpp", "layers to GPU", r"offloaded (?P<gpu_layers>\d+)/\d+ layers to GPU"),
    _pattern("llama.cpp", "n_ctx ", r"n_ctx += (?P<cells>\d+)"),
    _pattern("llama.cpp", "n_ubatch", r"n_ubatch += (?P<ubatch>\d+)"),
    _pattern("llama.cpp", "n_seq_max", r"n_seq_max += (?P<concurrency_slots>\d+)"),
    _pattern("llama.cpp", "flash_attn", r"flash_attn += (?P<flash>\w+)"),
    _pattern("llama.cpp", "general.name", r"general\.name +str += (?P<model>\S.*)"),
    _pattern("llama.cpp", "file type", r"file type += (?P<quantization>[\w.]+)"),
    _pattern("ollama", "memory.required", r'memory\.weights\.total="<weights_gib> GiB"'),
    _pattern("ollama", "memory.required", r'memory\.required\.kv="(?:<cache_gib> GiB|<cache_mib> MiB)"'),
    _pattern("ollama", "memory.required", r'memory\.graph\.full="(?:<activation_gib> GiB|<activation_mib> MiB)"'),
    _pattern("ollama", "memory.required", r"layers\.offload=(?P<gpu_layers>\d+)"),
    _pattern("ollama", "--ctx-size", r"--ctx-size (?P<cells>\d+)"),
    _pattern("ollama", "--parallel", r"--parallel (?P<concurrency_slots>\d+)"),
)
