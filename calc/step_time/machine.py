"""Rates that hold for hours and what the host needs: what no data sheet of a GPU says, each with its source."""

from __future__ import annotations

from typing import Final, NamedTuple

from calc.hardware import Gpu
from calc.kernel_times import KernelTimes

# Overlap: while a collective runs, compute kernels take this much longer: mean over H100, A100, MI250 and MI210, GPT and LLaMA
# (arXiv 2507.03114, abstract: 18.9 % against compute without communication at the same time)
OVERLAP_SLOWDOWN: Final = 0.189
OVERLAP_SOURCE: Final = "arXiv 2507.03114: compute is 18.9 % slower while communication overlaps it"


class Sustained(NamedTuple):
    """TFLOP/s of large products of random numbers, run for long: what the power limit leaves."""

    name: str
    dtype: str
    tflops: float
    source: str


# A second reading of both: Azure's AI-benchmarking-guide (cuBLASLt, random numbers, 10,000 warm-up runs) has 253.7 and 256.5 on A100
# in fp16, 1290 on H100 in fp8 (8192 cubed, and 16384).
_THONKING: Final = (
    "thonking.ai, 'Strangely, matrix multiplications': 8192 cubed, 257 of random numbers against 295 of zeros"
)
_SEMIANALYSIS: Final = (
    "SemiAnalysis, 'MI300X vs H100 vs H200 Benchmark Part 1: Training' (22 December 2024): five shapes of Llama 70B's training and 8192 "
    "cubed, normally distributed numbers, medians: H100 and H200 'roughly 720' in bf16 and 1,280 in fp8, MI300X 620 and 990"
)
# pytorch/ao, torchao/testing/float8/roofline_utils.py as of 2024: 0.6 of the peak "with sample large inputs" next to the 2.4 TB/s of
# "Meta's H100 variant". Its 0.78 of 2025 names no part and lies above what parts of 700 W sustain.
_META: Final = "torchao's roofline of Meta's H100 of 500 W: 0.6 of the peak with large inputs"
_SIMUMAX: Final = (
    "SimuMax, configs/system/b200_bf16_ceperm.json: median of 98 products of a training step on B200, 0.493 of 2250"
)
_MAMF: Final = (
    "ml-engineering, maximum achievable matmul FLOPS: {}, of which a mean large shape has 0.9 (H100 bf16: 720 of 794)"
)
_SUSTAINED: Final = (
    Sustained("a100-sxm", "bf16", 257.0, _THONKING),
    Sustained("h100-sxm-96gb", "bf16", 0.6 * 989, _META),
    Sustained("h100-sxm-96gb", "fp8", 0.6 * 1979, _META),
    Sustained("h100-sxm", "bf16", 720.0, _SEMIANALYSIS),
    Sustained("h200", "bf16", 720.0, _SEMIANALYSIS),
    Sustained("h100-sxm", "fp8", 1280.0, _SEMIANALYSIS),
    Sustained("h200", "fp8", 1280.0, _SEMIANALYSIS),
    Sustained("b200", "bf16", 1109.0, _SIMUMAX),
    Sustained("b200", "fp8", 0.9 * 3432.5, _MAMF.format("B200 fp8 3432.5 TFLOP/s")),
    Sustained("gb200", "fp8", 0.9 * 3615.6, _MAMF.format("GB200 fp8 3615.6 TFLOP/s")),
    Sustained("b300", "fp8", 0.9 * 3432.5, _MAMF.format("B200 fp8 3432.5 TFLOP/s, whose fp8 peak B300 shares")),
    Sustained("gb300", "fp8", 0.9 * 3615.6, _MAMF.format("GB200 fp8 3615.6 TFLOP/s, whose fp8 peak GB300 shares")),
    Sustained("mi300x", "bf16", 620.0, _SEMIANALYSIS),
    Sustained("mi300x", "fp8", 990.0, _SEMIANALYSIS),
)
# A weight's gradient that is added to fp32 sums in the product itself (Megatron) takes longer than a forward's product: 0.684 against
# 0.715 of the tables on B200, 0.833 against 0.898 on A100 (SimuMax, configs/system, medians of 98 and 31 products each)
ACCUMULATED: Final = 1.06

# Rows an expert at which a grouped product reaches half of a single one's rate, forward and for a weight's gradient, by the first figure
# of the compute capability: read off 108 grouped products on B200 and 12 on A100 (SimuMax, configs/system); Hopper lies between.
_HALF_ROWS: Final = {"8": (110.0, 205.0), "9": (140.0, 300.0), "10": (170.0, 400.0)}


class MemoryShare(NamedTuple):
    """Shares of the memory bandwidth that operators of a training step reach."""

    name: str
    most: float
    permutation: float  # of experts' rows
    loss: float


# SimuMax, configs/system/a100_pcie.json and b200_bf16_ceperm.json, measured with Transformer Engine; GB200, B300 and GB300 as B200
_MEMORY: Final = (
    MemoryShare("a100", 0.91, 0.188, 0.808),
    *(MemoryShare(name, 0.666, 0.501, 0.28) for name in ("b200", "gb200", "b300", "gb300")),
)


def memory_factors(times: KernelTimes) -> tuple[float, float, float]:
    """By how much a training step's memory-bound operators take longer than `KernelTimes.memory_bound` has it: most of them,
    permutations of experts' rows, and the loss. 1 where no source says."""
    found = next((share for share in _MEMORY if times.gpu.name.startswith(share.name)), None)
    if found is None or times.source == "roofline" or times.gpu.memory_bandwidth is None:
        return 1.0, 1.0, 1.0
    size = 2.0**30
    whole = size / times.gpu.memory_bandwidth / float(times.memory_bound(size))
    return whole / found.most, whole / found.permutation, whole / found.loss


# Host seconds for one operator of an eager training step, module and autograd included, by the first figure of the compute capability:
# the fixed latency of an operator in Megatron's steps on A100 and B200 (SimuMax, configs/system, latency_us 40 and 30); Hopper between.
# It hangs on the host's processor and on the module: one forward of torch's Linear takes 13.5 us on an x86 host (DGX H100) and 37 on Grace
# (GB200), Transformer Engine's 100 on Grace (NVIDIA/TransformerEngine, issue 2053).
_OPERATOR: Final = {"8": 40e-6, "9": 35e-6, "10": 30e-6}
OPERATOR_READINGS: Final = (13.5e-6, 100e-6)


def host_seconds(times: KernelTimes) -> float:
    """What the host needs to launch one operator of a training step without CUDA graphs."""
    if times.source == "roofline":
        return 0.0
    return _OPERATOR.get((times.gpu.compute_capability or "").partition(".")[0], _OPERATOR["9"])


def sustained(gpu: Gpu, dtype: str) -> Sustained | None:
    """What a source says of that GPU and format."""
    kind = "bf16" if dtype == "fp16" else dtype
    return next((one for one in _SUSTAINED if gpu.name.startswith(one.name) and one.dtype == kind), None)


# parts with a lower power limit than the one whose kernels stand for them, whose clocks it holds down
_LIMITED: Final = {"h100-sxm-96gb": "h100-sxm-80gb"}


def slower_clocks(gpu: Gpu) -> float:
    """By how much compute takes longer than on the part of full power, by the rates of large products; 1 on all other GPUs."""
    whole = _LIMITED.get(gpu.name)
    rates = {one.name: one.tflops for one in _SUSTAINED if one.dtype == "bf16"}
    return rates["h100-sxm"] / rates[gpu.name] if whole else 1.0


def half_rows(gpu: Gpu) -> tuple[float, float]:
    """Rows an expert for half a grouped product's rate: forward and input gradient, and weight gradient."""
    return _HALF_ROWS.get((gpu.compute_capability or "").partition(".")[0], _HALF_ROWS["9"])
