"""How fields appear where their type does not say it: labels with units, the stops of sliders, choices and their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from calc.catalogue import catalogue
from calc.commands import choices
from calc.hardware import gpus
from calc.number_formats import formats
from calc.pipeline import SCHEDULES
from calc.serving import ServingPlan
from calc.training import TrainingPlan
from calc.training.plan import NOT_MODELLED
from pages.ui import names

CUSTOM = "custom"  # a model whose config the user gives; a GPU described by its figures alone
HUB = "hugging-face"  # a model that the Hub has, by its id


@dataclass(frozen=True, slots=True)
class Appearance:
    """A field's label, the stops of its slider (none: no slider), its choices where they are not the plan's, how these are
    named, and what its empty box shows."""

    label: str = ""
    stops: tuple[int, ...] = ()
    choices: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    placeholder: str = "auto"


def _doubling(low: int, high: int) -> tuple[int, ...]:
    """Powers of two, low to high."""
    return tuple(low << place for place in range((high // low).bit_length()))


def _modelled(name: str) -> tuple[str, ...]:
    """The choices of the training plan's field that an answer knows."""
    return tuple(each for each in choices(TrainingPlan.model_fields[name]) if each not in NOT_MODELLED[name])


_SEQUENCE = _doubling(128, 2**20)
_TOKENS = tuple(mantissa * 10**place for place in range(9, 14) for mantissa in (1, 2, 5))

RECIPES = {
    "amp": "mixed, 16 B (autocast)",
    "bf16-autocast": "bf16, 8 B (autocast)",
    "fsdp-bf16": "mixed, 16 B (FSDP)",
    "mixed-16": "mixed, 16 B (ZeRO)",
    "megatron-bf16": "mixed, 18 B (Megatron)",
    "megatron-precision-aware": "mixed, 12 B (Megatron, bf16 states)",
    "megatron-fp16": "fp16, 20 B (Megatron)",
    "pure-bf16": "bf16 only, 8 B",
    "fp32": "fp32, 16 B",
    "fp8": "fp8 compute, 20 B",
}
RECOMPUTE = {"none": "none", "selective": "selective", "full": "full"}
IMPLEMENTATIONS = {
    "hf": "transformers",
    "liger": "transformers + Liger",
    "fused": "Megatron + Transformer Engine",
    "paper": "paper (2205.05198)",
    "deepspeed": "DeepSpeed",
    "torchtitan": "torchtitan",
    "litgpt": "LitGPT",
    "torchtune": "torchtune",
}
ENGINES = {
    "logical": "no engine (ideal)",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "tensorrt-llm": "TensorRT-LLM",
    "llama.cpp": "llama.cpp",
    "mlx": "MLX",
    "transformers": "transformers generate",
}
OPTIMIZERS = {
    "adamw": "AdamW",
    "sgd": "SGD",
    "momentum": "SGD with momentum",
    "adafactor": "Adafactor",
    "lion": "Lion",
    "muon": "Muon",
    "adamw-8bit": "AdamW, 8-bit states",
    "adamw-4bit": "AdamW, 4-bit states",
    "paged-adamw": "AdamW, paged",
}
_FORMATS = {
    "auto": "as published",
    "gptq-int4": "int4 (GPTQ)",
    "awq-int4": "int4 (AWQ)",
    "nf4": "NF4 (bitsandbytes)",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
    "mlx-int8": "int8 (MLX)",
    "mlx-int4": "int4 (MLX)",
}
FORMATS = {
    name: _FORMATS.get(name, f"GGUF {name.removeprefix('gguf-')}" if name.startswith("gguf-") else name)
    for name in choices(ServingPlan.model_fields["weights"])
}
SCHEDULE_NAMES = {
    "naive": "one at a time",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "looped-bfs": "looped BFS",
    "interleaved-zb": "interleaved zero bubble",
    "zb-h1": "ZB-H1",
    "zb-h2": "ZB-H2",
    "zb-v": "ZB-V",
    "dualpipe-v": "DualPipe-V",
    "pipedream": "PipeDream",
}
WORKLOADS = {
    "decoder-states": "States of a decoder",
    "saved-activations": "Saved activations",
    "checkpointing": "Activation checkpointing",
    "amp": "Autocast",
    "lora": "LoRA",
    "optimizer-temporaries": "Optimizer temporaries",
    "logits-peak": "Peak of the logits",
    "attention-memory": "Attention memory",
    "kv-cache-growth": "KV cache growth",
    "paged-decode": "Paged decode",
    "prefill-decode": "Prefill and decode",
    "matmul-rate": "Matmul rate",
    "memory-bandwidth": "Memory bandwidth",
    "fused-kernels": "Fused kernels",
    "pcie": "PCIe",
    "context-and-workspace": "CUDA and framework overhead",
    "quantisation-error": "Quantisation error",
    "flops": "FLOPs and MFU",
    "collectives": "Collectives",
    "ddp-states": "States under DDP",
    "zero1-states": "States under ZeRO-1",
    "fsdp2-states": "States under FSDP2",
    "tensor-parallel": "States under tensor parallelism",
    "pipeline-schedules": "Pipeline schedules",
    "standard": "All for one device",
    "several-devices": "All for several devices",
}
TIMES = {"measured": "measured kernels", "calibrated": "calibrated", "roofline": "roofline"}
METHODS = {"full": "full fine-tuning", "lora": "LoRA", "dora": "DoRA", "qlora": "QLoRA"}
TOPICS = {
    "bare-model": "A model from its sizes",
    "parts-by-cost": "Norms, activations, positions",
    "number-formats": "Number formats",
    "half-precision": "Loss scaling and small steps",
    "zero-stages": "Training states and ZeRO",
    "checkpointing": "Gradient checkpointing",
    "low-rank": "LoRA",
    "attention-memory": "Attention and FlashAttention",
    "all-reduce": "Ring all-reduce",
    "parallel-layer": "A layer on several ranks",
    "pipeline": "Pipeline schedules",
    "cache-kinds": "KV caches by kind",
    "paged-blocks": "Paged KV cache",
    "batching": "Static and continuous batching",
    "speculation": "Speculative decoding",
    "layer-roofline": "Roofline of a layer",
    "compute-budget": "Scaling laws",
}
CALIBRATED = {"off": "off", "point": "median", "bound": "conservative"}

APPEARANCE: Mapping[str, Appearance] = {
    "model": Appearance("Model", choices=(*names.models(catalogue()), HUB, CUSTOM), named=names.MODELS),
    "hub_id": Appearance("Hugging Face id", placeholder="owner/name"),
    "gpu": Appearance("GPU", choices=(*names.devices(gpus()), CUSTOM), named=names.DEVICES),
    "gpu_memory_gib": Appearance("Memory (GiB)", placeholder="of the GPU"),
    "gpu_tflops": Appearance("Peak (TFLOP/s)", placeholder="of the GPU"),
    "gpu_GBps": Appearance("Memory bandwidth (GB/s)", placeholder="of the GPU"),
    "calibrated": Appearance("Calibrate with my GPU", named=CALIBRATED),
    "units": Appearance("Bytes in"),
    "gpus": Appearance("GPUs", _doubling(1, 2**14)),
    "layout": Appearance("Layout"),
    "seq": Appearance("Sequence (tokens)", _SEQUENCE),
    "context": Appearance("Context (tokens)", _doubling(1024, 2**20)),
    "prompt": Appearance("Prompt (tokens)", placeholder="the context without the output"),
    "prompt_tokens": Appearance("Prompt (tokens)"),
    "output": Appearance("Output (tokens)", placeholder="none"),
    "keep_window": Appearance("Window kept (tokens)", placeholder="all"),
    "keep_sinks": Appearance("Sinks kept (tokens)", placeholder="none"),
    "micro_batch": Appearance("Micro-batch (sequences)", _doubling(1, 256)),
    "global_batch": Appearance("Global batch (sequences)", placeholder="micro-batch · dp"),
    "ubatch": Appearance("llama.cpp's ubatch"),
    "concurrency": Appearance("Concurrent requests", _doubling(1, 1024)),
    "dp": Appearance("Data parallel (dp)"),
    "zero": Appearance("ZeRO stage"),
    "tp": Appearance("Tensor parallel (tp)"),
    "pp": Appearance("Pipeline stages (pp)"),
    "cp": Appearance("Context parallel (cp)"),
    "ep": Appearance("Expert parallel (ep)"),
    "dp_replicate": Appearance("Replicas (HSDP)"),
    "recipe": Appearance("Precision", named=RECIPES),
    "recompute": Appearance("Activation checkpointing", named=RECOMPUTE),
    "implementation": Appearance("Program", named=IMPLEMENTATIONS),
    "optimizer": Appearance("Optimizer", named=OPTIMIZERS),
    "times": Appearance("Times from", named=TIMES),
    "method": Appearance("Method", named=METHODS),
    "engine": Appearance("Engine", named=ENGINES),
    "ranks": Appearance("Ranks", placeholder="every GPU"),
    "workload": Appearance("Workload", named=WORKLOADS),
    "own_model": Appearance("The scenario's model"),
    "nvme": Appearance("Offload to NVMe"),
    "nvme_GBps": Appearance("NVMe (GB/s)", placeholder="1.6"),
    "context_mib": Appearance("CUDA context (MiB)"),
    "nccl_mib": Appearance("NCCL (MiB)"),
    "workspace_mib": Appearance("Workspace (MiB)"),
    "fragmentation_percent": Appearance("Fragmentation (%)"),
    "weights": Appearance("Weights", named=FORMATS),
    "kv_dtype": Appearance("KV cache format", named={"auto": "as the model"}),
    "gpu_memory_utilization": Appearance("Share of GPU memory"),
    "block_size": Appearance("Block (tokens)"),
    "max_batched_tokens": Appearance("Tokens a step"),
    "max_seqs": Appearance("Sequences a step"),
    "kv_memory_gib": Appearance("Cache given (GiB)", placeholder="what is left"),
    "objective": Appearance("Objective", choices=_modelled("objective")),
    "reference": Appearance("Reference model"),
    "compute_efficiency": Appearance("Prefill efficiency"),
    "bandwidth_efficiency": Appearance("Decode efficiency"),
    "stages": Appearance("Stages (ranks)", tuple(range(1, 33))),
    "microbatches": Appearance("Micro-batches", _doubling(1, 256)),
    "tokens": Appearance("Tokens to train on", _TOKENS, placeholder="one sequence"),
    "mfu": Appearance("MFU"),
    "dtype": Appearance("Precision of the matmuls"),
    "gpu_hours": Appearance("Known GPU-hours", placeholder="unknown"),
    "price_per_gpu_hour": Appearance("Price of a GPU-hour", placeholder="unknown"),
    "power_utilization": Appearance("Share of the board power"),
    "pue": Appearance("PUE"),
    "grid_intensity": Appearance("Carbon (kg CO₂e per kWh)"),
    "lora_rank": Appearance("LoRA rank", placeholder="off"),
    "lora_targets": Appearance("LoRA targets"),
    "forward": Appearance("Forward (s)"),
    "backward_input": Appearance("Input gradient (s)"),
    "backward_weight": Appearance("Weight gradient (s)"),
    "virtual_stages": Appearance("Virtual stages"),
    "topic": Appearance("Topic", named=TOPICS),
    "hidden_size": Appearance("Hidden size (h)", _doubling(64, 2**15)),
    "num_hidden_layers": Appearance("Layers (L)", _doubling(1, 128)),
    "num_attention_heads": Appearance("Query heads (a)", _doubling(1, 256)),
    "num_key_value_heads": Appearance("Key and value heads (k)", _doubling(1, 256)),
    "intermediate_size": Appearance("MLP width (f)", _doubling(128, 2**17)),
    "vocab_size": Appearance("Vocabulary (V)", _doubling(1024, 2**18)),
    "num_experts": Appearance("Experts a layer", (0, *_doubling(1, 512))),
    "experts_per_token": Appearance("Experts a token", _doubling(1, 32)),
    "number_format": Appearance("Format", choices=tuple(form.name for form in formats())),
    "spacing_at": Appearance("Spacing at"),
    "rounded": Appearance("What is rounded"),
    "trained_parameters": Appearance("Parameters", tuple(10**9 * size for size in (1, 7, 13, 70, 175, 405, 1000))),
    "data_parallel_ranks": Appearance("Ranks (n)", _doubling(1, 1024)),
    "ledger": Appearance("Precision", named=RECIPES),
    "ring_ranks": Appearance("Ranks (n)", tuple(range(2, 17))),
    "ring_step": Appearance("Steps that are over", tuple(range(31))),
    "message_bytes": Appearance("Buffer (bytes)"),
    "chain_layers": Appearance("Layers (n)", (4, 9, 16, 25, 36, 49, 64, 81, 100)),
    "checkpoint_every": Appearance("Checkpoint every (layers)", tuple(range(1, 33))),
    "matrix_rows": Appearance("Rows (d)", _doubling(64, 2**15)),
    "matrix_columns": Appearance("Columns (k)", _doubling(64, 2**15)),
    "adapter_rank": Appearance("Rank (r)", _doubling(1, 512)),
    "attention_tokens": Appearance("Tokens (N)", _doubling(128, 2**17)),
    "attention_head_size": Appearance("Head size (d)", (32, 64, 96, 128, 192, 256)),
    "on_chip_kib": Appearance("On-chip memory (KiB)", (64, 100, 164, 192, 228)),
    "scores_a_block": Appearance("Scores a block", tuple(range(1, 9))),
    "layer_hidden": Appearance("Hidden size (h)", _doubling(256, 2**15)),
    "layer_width": Appearance("MLP width (f)"),
    "layer_tokens": Appearance("Tokens of a micro-batch", _doubling(128, 2**17)),
    "tensor_ranks": Appearance("Tensor parallel (t)", _doubling(1, 64)),
    "expert_ranks": Appearance("Expert parallel (e)", _doubling(1, 256)),
    "split_norms": Appearance("Sequence parallel"),
    "layer_heads": Appearance("Query heads (a)"),
    "layer_kv_heads": Appearance("Key and value heads (k)"),
    "layer_experts": Appearance("Experts"),
    "chosen_experts": Appearance("Experts a token (K)"),
    "cached": Appearance("Tokens", _doubling(128, 2**20)),
    "shared_prompt": Appearance("Prompt (tokens)", tuple(range(1, 33))),
    "answers": Appearance("Answers", tuple(range(1, 9))),
    "answer_tokens": Appearance("Tokens of an answer", tuple(range(33))),
    "tokens_a_block": Appearance("Block (tokens)", (1, 2, 4, 8, 16, 32)),
    "reserved_tokens": Appearance("Reserved if without blocks"),
    "request_tokens": Appearance("Tokens of each request"),
    "slots": Appearance("Slots", tuple(range(1, 17))),
    "drafted": Appearance("Draft (tokens)", tuple(range(17))),
    "acceptance": Appearance("Accepted"),
    "draft_cost": Appearance("Draft's step, a share"),
    "hidden": Appearance("Hidden size (h)", _doubling(256, 2**15)),
    "query_heads": Appearance("Query heads (a)"),
    "kv_heads": Appearance("Key and value heads (k)"),
    "width": Appearance("MLP width (f)"),
    "sequences": Appearance("Sequences", _doubling(1, 1024)),
    "cached_tokens": Appearance("Cached tokens of each", _doubling(128, 2**17)),
    "loss_scale_power": Appearance("Loss scale (power of 2)", tuple(range(31))),
    "weight_steps": Appearance("Steps", (1, 10, 100, 500, 1000, 2000)),
    "weight_step": Appearance("Added in a step"),
    "training_flops": Appearance("Training FLOPs"),
    "schedule": Appearance("Schedule", choices=tuple(SCHEDULES), named=SCHEDULE_NAMES),
}


def appearance(name: str) -> Appearance:
    """How a field appears; a field without a row has its name as its label."""
    return APPEARANCE.get(name) or Appearance(name.replace("_", " ").capitalize())
