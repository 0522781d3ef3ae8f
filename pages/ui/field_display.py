"""How fields look where their type does not say it: labels with units, the stops of sliders, choices."""

from __future__ import annotations

from dataclasses import dataclass

from calc.catalogue import catalogue
from calc.commands import choices
from calc.hardware import gpus
from calc.pipeline import SCHEDULES
from calc.training import TrainingPlan
from calc.training.plan import NOT_MODELLED

CUSTOM = "custom"  # a model whose config the user gives; a GPU described by its figures alone
HUB = "hugging-face"  # a model that the Hub has, by its id


@dataclass(frozen=True, slots=True)
class Look:
    """A field's label, the stops of its slider (none: no slider), its choices where they are not the plan's, its step, what
    its empty box shows, whether its numbers are long."""

    label: str = ""
    stops: tuple[int, ...] = ()
    choices: tuple[str, ...] = ()
    step: float = 0
    placeholder: str = "auto"
    wide: bool = False


def _doubling(low: int, high: int) -> tuple[int, ...]:
    """Powers of two and the halves between them, low to high: small steps where numbers are small."""
    powers = [low << place for place in range((high // low).bit_length())]
    return tuple(sorted({stop for power in powers for stop in (power, power * 3 // 2) if stop <= high}))


def _modelled(name: str) -> tuple[str, ...]:
    """The choices of the training plan's field that an answer knows."""
    return tuple(each for each in choices(TrainingPlan.model_fields[name]) if each not in NOT_MODELLED[name])


_SEQUENCE = _doubling(128, 2**20)

_TOKENS = (0, *(mantissa * 10**place for place in range(9, 15) for mantissa in (1, 2, 5)))

LOOKS = {
    "model": Look("Model", choices=(*catalogue(), HUB, CUSTOM)),
    "hub_id": Look("Hugging Face id", placeholder="owner/name"),
    "gpu": Look("GPU", choices=(*gpus(), CUSTOM)),
    "gpu_memory_gib": Look("Memory (GiB)", step=1),
    "gpu_tflops": Look("Peak (TFLOP/s)", step=10),
    "gpu_GBps": Look("Memory bandwidth (GB/s)", step=10),
    "compare": Look("Compare with a second scenario"),
    "calibrated": Look("Use my measurements"),
    "units": Look("Bytes in"),
    "seq": Look("Sequence (tokens)", _SEQUENCE),
    "context": Look("Context (tokens)", _SEQUENCE),
    "micro_batch": Look("Micro-batch (sequences)", _doubling(1, 256)),
    "ubatch": Look("llama.cpp's ubatch", step=64),
    "concurrency": Look("Sequences at once", _doubling(1, 1024)),
    "dp": Look("Data parallel (dp)", _doubling(1, 4096)),
    "zero": Look("ZeRO stage", (0, 1, 2, 3)),
    "tp": Look("Tensor parallel (tp)"),
    "pp": Look("Pipeline stages (pp)"),
    "cp": Look("Context parallel (cp)"),
    "ep": Look("Expert parallel (ep)"),
    "dp_replicate": Look("Replicas (HSDP)"),
    "global_batch": Look("Global batch"),
    "reshard_after_forward": Look("Reshard after forward"),
    "sequence_parallel": Look("Sequence parallelism"),
    "optimizer_kernel": Look("Optimizer kernel"),
    "ranks": Look("Ranks"),
    "own_model": Look("Sidebar's model"),
    "nvme": Look("Offload to NVMe"),
    "nvme_GBps": Look("NVMe (GB/s)", step=0.1, placeholder="1.6"),
    "context_mib": Look("CUDA context (MiB)", step=64),
    "nccl_mib": Look("NCCL (MiB)", step=64),
    "workspace_mib": Look("Workspace (MiB)", step=8),
    "fragmentation_percent": Look("Fragmentation (%)", step=1),
    "weights": Look("Weights"),
    "kv_dtype": Look("KV cache format"),
    "gpu_memory_utilization": Look("Share of GPU memory", step=0.01),
    "block_size": Look("Block (tokens)", step=16),
    "max_batched_tokens": Look("Tokens a step"),
    "max_seqs": Look("Sequences a step"),
    "kv_memory_gib": Look("Cache given (GiB)", step=1),
    "prompt": Look("Prompt (tokens)"),
    "prompt_tokens": Look("Prompt (tokens)", _SEQUENCE),
    "objective": Look("Objective", choices=_modelled("objective")),
    "reference": Look("Reference model"),
    "output": Look("Output (tokens)"),
    "keep_window": Look("Window kept (tokens)"),
    "keep_sinks": Look("Sinks kept (tokens)"),
    "compute_efficiency": Look("Prefill efficiency", step=0.05),
    "bandwidth_efficiency": Look("Decode efficiency", step=0.05),
    "stages": Look("Stages (ranks)", tuple(range(1, 33))),
    "microbatches": Look("Micro-batches", _doubling(1, 256)),
    "tokens": Look("Tokens to train on", _TOKENS, step=10**9, wide=True),
    "gpus": Look("GPUs", _doubling(1, 2**17)),
    "mfu": Look("MFU", step=0.01),
    "dtype": Look("Precision"),
    "gpu_hours": Look("Known GPU-hours", step=1000),
    "price_per_gpu_hour": Look("Price of a GPU-hour"),
    "power_utilization": Look("Share of the board power"),
    "pue": Look("PUE"),
    "grid_intensity": Look("Carbon (kg CO₂e per kWh)", step=0.01),
    "lora_rank": Look("LoRA rank"),
    "lora_targets": Look("LoRA targets"),
    "forward": Look("Forward (s)"),
    "backward_input": Look("Input gradient (s)"),
    "backward_weight": Look("Weight gradient (s)"),
    "virtual_stages": Look("Virtual stages"),
    "schedule": Look("Schedule", choices=tuple(SCHEDULES)),
}
