"""What of vLLM's memory changed from version to version, each with its source.

A change names the first version that has it. Where the exact one is not known, it is the first of the released wheels 0.6.4, 0.8.5,
0.10.2, 0.14.1, 0.19.0, 0.24.0 and 0.33.0 whose files show it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from calc.errors import InputError
from calc.units import GiB, MiB

NEWEST = "0.33"
ASYNC_SINCE = (
    0,
    25,
)  # the cache has blocks for two batches in flight (max_in_flight_tokens in v1/core/kv_cache_coordinator.py of 0.33.0)
OVERLAP_SINCE = (
    0,
    14,
)  # async_scheduling is on unless it is turned off (vllm/config/vllm.py; off in 0.10.2, on in 0.14.1)
OLDEST = "0.6"

SamplerKernel = Literal["sort", "triton", "flashinfer"]


@dataclass(frozen=True, slots=True)
class Change:
    """A fact from that version on."""

    since: tuple[int, int]
    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Topic:
    """One constant over the versions. `meaning` says what it is, with its unit."""

    name: str
    meaning: str
    changes: tuple[Change, ...]

    def at(self, version: tuple[int, int]) -> Change:
        """The last change that the version has."""
        return [change for change in self.changes if change.since <= version][-1]


_PLANNER = "llm-d, capacity planner accuracy report (H100, 60 runs of vLLM 0.19.0 and Qwen3-14B on 0.15 to 0.18)"
_EMPIRICAL = "llm-d-benchmark, config_explorer/empirical-vllm-memory-results.md (H100, 2025)"

UTILIZATION = Topic(
    "gpu_memory_utilization",
    "share of the driver's total that the engine takes unless told otherwise",
    (
        Change((0, 6), 0.90, "vllm/config.py, 0.6.4"),
        Change((0, 20), 0.92, "vllm/config/cache.py: 0.9 in 0.19.0, 0.92 in 0.24.0"),
    ),
)
# bytes of each of max_num_seqs x vocabulary logits at the sampler's highest point
SAMPLER_BYTES = Topic(
    "sampler_bytes",
    "bytes a logit while the dummy requests are sampled",
    (
        Change(
            (0, 6),
            38,
            "logits in 16 bits 2 and in fp32 4, sorted values 4 and indices 8 (v1/sample/ops/topk_topp_sampler.py), the sort's reverse "
            "indices 8 and its second keys and values 12 (PyTorch, aten/src/ATen/native/cuda/SortStable.cu; cub's segmented radix sort)",
        ),
        Change(
            (0, 17),
            14,
            "logits in 16 bits 2 and in fp32 4, probabilities 4 and exponential noise 4 (masked in place by the Triton kernel), or "
            "FlashInfer's masked logits 4 and probabilities 4; the drop from 0.16 to 0.17 is in " + _PLANNER,
        ),
    ),
)
SAMPLER_ROWS = Topic(
    "sampler_rows",
    "rows of fp32 logits for each multiprocessor",
    (
        Change((0, 6), 0, "a sort needs none"),
        Change((0, 17), 1, "v1/sample/ops/topk_topp_triton.py keeps one row a program, one program a multiprocessor"),
        Change((0, 24), 0, "FlashInfer samples by default (VLLM_USE_FLASHINFER_SAMPLER is on in envs.py of 0.24.0)"),
    ),
)
SAMPLER_STATE = Topic(
    "sampler_state_bits",
    "bits kept for each of max_num_seqs x vocabulary",
    (
        Change((0, 6), 0, "penalties are computed when a request asks for them"),
        Change((0, 33), 33, "v1/worker/gpu/sample/penalties.py: an int32 count and one bit of a mask"),
    ),
)
KEEPS_EXPERT_WORKSPACE = Topic(
    "expert_workspace_kept",
    "whether the experts' workspace outlives the step (1) or not (0)",
    (
        Change((0, 6), 0, "fused_moe.py allocates its intermediate caches in each call (0.6.4 to 0.14.1)"),
        Change((0, 17), 1, "v1/worker/workspace.py (0.19.0) keeps the largest; seen in the activations of " + _PLANNER),
    ),
)
GRAPHS_COUNTED = Topic(
    "graphs_counted",
    "whether CUDA graphs are taken from the cache (1) or come on top (0)",
    (
        Change((0, 6), 0, "graphs are captured after the cache is sized"),
        Change(
            (0, 21), 1, "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS: 'default since v0.21.0' (v1/worker/gpu_worker.py)"
        ),
    ),
)
NON_TORCH_ALONE = Topic(
    "non_torch_one_gpu",
    "bytes outside torch's allocator on one GPU without tensor parallelism",
    (
        Change((0, 6), int(0.3 * GiB), "the CUDA context is counted in: 0.35 (RTX 3090) and 0.26 (A100), vllm#10517"),
        Change((0, 7), int(0.1 * GiB), "logs of 0.7 and 0.8.5: 0.04 to 0.16, the context left out"),
        Change((0, 9), int(0.13 * GiB), _EMPIRICAL + " and " + _PLANNER),
        Change((0, 18), int(0.25 * GiB), _PLANNER + ": 0.24 to 0.26, 0.07 on a stage of a pipeline"),
    ),
)
NON_TORCH_STAGE = Topic(
    "non_torch_pipeline_stage",
    "bytes outside torch's allocator on a stage of a pipeline without tensor parallelism",
    (Change((0, 6), int(0.07 * GiB), _PLANNER + ": 0.07 at 2 and at 4 stages"),),
)
NON_TORCH_LINKED = Topic(
    "non_torch_tensor_parallel",
    "bytes outside torch's allocator with tensor parallelism over NVLink",
    (
        Change((0, 6), int(2.1 * GiB), "NCCL and custom all-reduce; a log of 0.7 on 8 A100: 2.10"),
        Change((0, 9), int(0.55 * GiB), _EMPIRICAL + ": TP 2"),
        Change((0, 18), int(2.1 * GiB), _PLANNER + ": 2.06 to 2.17 at TP 2 and 4"),
    ),
)
NON_TORCH_PCIE = Topic(
    "non_torch_tensor_parallel_pcie",
    "bytes outside torch's allocator with tensor parallelism over PCIe alone",
    (Change((0, 6), int(0.33 * GiB), "vllm#14452: 0.33 on two RTX 5090; 0.25 on two RTX 4090 (vllm#13061)"),),
)
GRAPH_PIECEWISE = Topic(
    "graph_bytes_piecewise",
    "bytes a layer and captured size of a graph cut at attention",
    (
        Change((0, 6), 0, "one whole graph a size"),
        Change(
            (0, 8), int(0.24 * MiB), "vllm#48214: 51 piecewise graphs 0.44 GiB; a V1 log: 67 of Llama-3.1-8B 0.51 GiB"
        ),
    ),
)
GRAPH_FULL = Topic(
    "graph_bytes_full",
    "bytes a layer and captured size of a whole graph of decode",
    (
        Change((0, 6), int(0.2 * MiB), "a log of 0.6.4: 35 graphs of Phi-4 (40 layers) 0.27 GiB"),
        Change((0, 8), 0, "V1 cuts every graph at attention"),
        Change((0, 11), int(0.3 * MiB), _PLANNER + ": both kinds 0.84 GiB for Llama-3.1-8B, at most 1.85"),
    ),
)
TOPICS = (
    UTILIZATION,
    SAMPLER_BYTES,
    SAMPLER_ROWS,
    SAMPLER_STATE,
    KEEPS_EXPERT_WORKSPACE,
    GRAPHS_COUNTED,
    NON_TORCH_ALONE,
    NON_TORCH_STAGE,
    NON_TORCH_LINKED,
    NON_TORCH_PCIE,
    GRAPH_PIECEWISE,
    GRAPH_FULL,
)

_SPELLING = re.compile(r"v?(\d{1,3})\.(\d{1,3})(?:\.\d{1,4})?(?:\.?(?:post|rc|dev)\d{1,6})?")


@cache
def version(text: str | None) -> tuple[int, int]:
    """(major, minor) of `0.19`, `v0.19.0` or None for the newest. InputError for what is no version, or is older than 0.6."""
    match = _SPELLING.fullmatch(text or NEWEST)
    found = (int(match[1]), int(match[2])) if match else None
    if found is None or found < (0, 6):
        raise InputError.of(
            "engine_version",
            text,
            f"vLLM's versions from {OLDEST} to {NEWEST} are known here, written as 0.19 or v0.19.0",
        )
    return found


def is_v0(number: tuple[int, int], compute_capability: str | None = None) -> bool:
    """Whether the first engine runs: without chunked prefill. The second is the default from 0.8 on, but not on cards below compute
    capability 8.0, which it does not run on (vllm/engine/arg_utils.py, 0.8.5); from 0.11 on it is the only one."""
    if number < (0, 8):
        return True
    old = compute_capability is not None and int(compute_capability.split(".")[0]) < 8
    return number < (0, 11) and old
