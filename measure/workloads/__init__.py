"""What can be measured: a plain table of workloads, each named with the formula that it tests.

To add one: a function `NAME(setting)` in a module of this folder that yields `Measured` rows, and a line in WORKLOADS. Importing
this imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Final

from calc.measurements.records import Measured
from measure.distributed import JOBS
from measure.distributed.launch import on_several
from measure.setting import Run, Setting


@dataclass(frozen=True, slots=True)
class Workload:
    """A named measurement. `tests` says which formula it puts to the test, `needs` what it takes.

    `run` yields each row as soon as it is measured; every row that was yielded is kept, however the run ends. `seconds` is about
    what the small size takes on two CPU cores: the shares of a suite's progress. `takes_model`: it measures the user's model.
    `needs_gpu`: it measures what only a GPU has.
    """

    name: str
    tests: str
    needs: str
    run: Run
    seconds: float = 1.0
    takes_model: bool = False
    needs_gpu: bool = False


def _later(module: str, function: str = "run") -> Run:
    """The function of a module of this folder, imported (with torch) when it is run."""

    def run(setting: Setting) -> Iterator[Measured]:
        found: Run = getattr(import_module(f"measure.workloads.{module}"), function)
        return found(setting)

    return run


_TRACED = "any device; without a GPU the trace stands in for the allocator's readings"
_TABLE = (
    Workload(
        "decoder-states",
        "ledger of bytes per parameter (fp32, amp, pure-bf16): states of a real decoder after two AdamW steps",
        "any device; 0.1 GB (small) or 3 GB (medium)",
        _later("decoder_states"),
        2.0,
    ),
    Workload(
        "saved-activations",
        "ledger of saved activations and the peak by phase, at two depths and extended to the full one",
        _TRACED,
        _later("training_memory", "saved_activations"),
        3.0,
        takes_model=True,
    ),
    Workload(
        "checkpointing",
        "saving of full recomputation, and its extra time: one more forward pass of the layers, 20 to 40 %",
        f"{_TRACED}; its time is measured on the device",
        _later("training_memory", "checkpointing"),
        5.0,
        takes_model=True,
    ),
    Workload(
        "amp",
        "states, activations and peaks of autocast against fp32 and bf16",
        _TRACED,
        _later("training_memory", "amp"),
        3.0,
        takes_model=True,
    ),
    Workload(
        "lora",
        "states, activations and peaks with peft's adapters against full training",
        _TRACED,
        _later("training_memory", "lora"),
        3.0,
        takes_model=True,
    ),
    Workload(
        "optimizer-temporaries",
        "peak of AdamW's step by kernel: foreach holds a copy of v, loop two of the largest tensor, fused none",
        _TRACED,
        _later("training_memory", "optimizer_temporaries"),
        2.0,
        takes_model=True,
    ),
    Workload(
        "logits-peak",
        "peak of head and loss: 2.5 times the fp32 logits in forward, 3 times in backward",
        _TRACED,
        _later("training_memory", "logits_peak"),
        2.0,
    ),
    Workload(
        "attention-memory",
        "what attention keeps for backward, O(s²) standard and O(s) flash, and its time, over s",
        "any device; kept bytes are counted by storage, peaks and Triton's kernel need a GPU",
        _later("attention"),
        3.0,
    ),
    Workload(
        "kv-cache-growth",
        "2·k·d·bytes a token and layer: what transformers' DynamicCache holds",
        "any device",
        _later("inference", "kv_cache_growth"),
        2.0,
        takes_model=True,
    ),
    Workload(
        "paged-decode",
        "S·k·2·d·bytes of cache read by a decode step over the memory's bandwidth, from blocks of 16 tokens",
        "any device; Triton's kernel needs a GPU",
        _later("inference", "paged_decode"),
        2.0,
    ),
    Workload(
        "prefill-decode",
        "roofline of the first token and of each further one, at the rates that this device reaches",
        "any device",
        _later("inference", "prefill_decode"),
        4.0,
    ),
    Workload(
        "matmul-rate",
        "2·M·N·K FLOPs over the data sheet's peak, by shape and format",
        "any device; fp8 needs compute capability 8.9, Triton's kernel a GPU",
        _later("matmul_and_bandwidth", "matmul_rate"),
        4.0,
    ),
    Workload(
        "memory-bandwidth",
        "2·N·itemsize bytes moved by a copy and 3·N·itemsize by a triad over the data sheet's bandwidth",
        "any device; 0.8 GB (small) or 6 GB (medium); Triton's kernel needs a GPU",
        _later("matmul_and_bandwidth", "memory_bandwidth"),
        4.0,
    ),
    Workload(
        "fused-kernels",
        "bytes that softmax, norms, SwiGLU, RoPE, cross-entropy, AdamW and quantised weights move over the memory's bandwidth",
        "any device; Triton's kernels need a GPU",
        _later("memory_bound_kernels"),
        3.0,
    ),
    Workload(
        "pcie",
        "bytes over the link between host and GPU, each way, against the data sheet",
        "a GPU",
        _later("gpu_only", "pcie"),
        0.1,
        needs_gpu=True,
    ),
    Workload(
        "context-and-workspace",
        "CUDA and framework overhead: CUDA context, cuBLAS workspace, fragmentation",
        "a GPU",
        _later("gpu_only", "context_and_workspace"),
        0.1,
        needs_gpu=True,
    ),
    Workload(
        "quantisation-error",
        "bounds M/254 of absmax int8 (step M/127) and half the widest gap of NF4, on real tensors",
        "any device",
        _later("quantisation"),
        2.0,
    ),
    Workload(
        "flops",
        "exact training FLOPs and 6ND against PyTorch's FlopCounterMode, and the MFU that a step reaches",
        "any device",
        _later("compute_flops"),
        4.0,
        takes_model=True,
    ),
)
_SEVERAL = tuple(Workload(job.name, job.tests, job.needs, on_several(job.name), job.seconds) for job in JOBS.values())
WORKLOADS: Final = {workload.name: workload for workload in (*_TABLE, *_SEVERAL)}
# names for several, run one after the other; what cannot be measured here is passed over and says why
SUITES: Final = {"standard": tuple(workload.name for workload in _TABLE), "several-devices": tuple(JOBS)}
