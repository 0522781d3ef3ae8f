"""Seconds of one kernel on a GPU, with the words that say where they are from.

Every function takes whole numbers or arrays of them, broadcast together, and returns seconds in that shape (a plain float for
plain numbers). Times are of a kernel inside a CUDA graph: the host's launch cost is `eager_launch` a kernel, on top.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from calc.errors import InputError
from calc.hardware import Gpu
from calc.kernel_times import work
from calc.kernel_times.grids import FloatArray, Numbers
from calc.kernel_times.tables import Table, index, relatives, table
from calc.kernel_times.work import FORMATS, KV_BYTES, Work

if TYPE_CHECKING:
    from calc.measurements.calibration import Calibration

Source = Literal["measured", "calibrated", "roofline"]
Engine = Literal["vllm", "sglang", "trtllm"]
Skew = Literal["balanced", "power_law", "power_law_1.2"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]

# where no table speaks of a kind: the share of the peak and of the bandwidth that large bf16 products and copies reach on most GPUs
# of the tables (0.64 to 0.90 and 0.70 to 0.84), and the relative error that this leaves
_SHARE: Final = 0.8
# host seconds of one kernel launched by PyTorch without a graph: assumed, since the tables time graphs; the custom all-reduces that
# they also time launched one by one cost the host 15 to 40 µs, PyTorch's plain operators a few
_EAGER_LAUNCH: Final = 6e-6
# GPUs whose large products were measured and lie elsewhere than their relative's: the share of the peak over the relative's
# (stas00/ml-engineering, compute/accelerator: MAMF of MI300X 0.51, of H100 0.80)
_REACHED: Final = {"mi300x-192gb": 0.51 / 0.80}
_UNKNOWN_ERROR: Final = (0.3, 0.6)


class KernelTimes:
    """The kernels of one GPU. `source` and `notes` are for users: whose measurements these are, and what is missing."""

    def __init__(
        self, gpu: Gpu, source: Source = "measured", engine: Engine | None = None, own: Calibration | None = None
    ) -> None:
        """`own`: what the user measured on the GPU. InputError when the memory bandwidth is unknown, without which no kernel has a time."""
        if gpu.memory_bandwidth is None:
            raise InputError.of("gpu", gpu.name, "no source gives its memory bandwidth; --gpu-GBps gives one")
        self.gpu = gpu
        self.engine = engine
        self._bandwidth = gpu.memory_bandwidth
        self._relatives = () if source == "roofline" else relatives(gpu)
        self._exact = source == "roofline"
        self._of_peak = _REACHED.get(gpu.name, 1.0)
        self._own = {figure.name: figure.point for figure in own.figures} if own else {}
        if "bandwidth_efficiency" in self._own:
            copied = 2.0**30
            self._bandwidth *= (
                self._own["bandwidth_efficiency"] * float(self.memory_bound(copied)) / (copied / self._bandwidth)
            )
        if "compute_efficiency" in self._own and (peak := gpu.peak_flops("bf16")):
            self._of_peak = 1.0
            self._of_peak = self._own["compute_efficiency"] * float(self.gemm(8192, 8192, 8192)) / (2 * 8192**3 / peak)
        self.launch_floor = 0.0 if self._exact else float(self.memory_bound(1))
        self.eager_launch = 0.0 if self._exact else _EAGER_LAUNCH

    @property
    def source(self) -> str:
        """Where the times are from, in the words that a page shows."""
        if self._exact:
            return "roofline"
        if self._own:
            return "own GPU"
        nearest = self._relatives[0]
        return f"table {nearest}" if nearest == self.gpu.name else f"table {nearest} by relation"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know of the source."""
        if self._exact:
            return (f"roofline: every kernel at the full peak and bandwidth of {self.gpu.name}, without launch cost",)
        nearest, found = self._relatives[0], []
        if nearest != self.gpu.name:
            found.append(
                f"{self.gpu.name} has no measured kernels: the shares of peak and bandwidth are those of {nearest}"
            )
        if self._own:
            names = " and ".join(name.replace("_", " ") for name in self._own)
            found.append(f"own GPU: {names} as measured here; how kernels differ by shape is that of {nearest}")
        return tuple(found)

    def gemm(self, m: Numbers, n: Numbers, k: Numbers, *, dtype: str = "bf16") -> FloatArray:
        """One matrix product [m, k] x [k, n]. InputError when the GPU cannot multiply in that format."""
        self._check(dtype)
        return self._seconds("gemm", dtype, work.gemm(m, n, k, dtype))

    def context_attention(
        self,
        *,
        batch: Numbers,
        query: Numbers,
        context: Numbers = 0,
        heads: Numbers,
        kv_heads: Numbers,
        head_dim: Numbers,
        kv_dtype: str = "bf16",
        window: Numbers = 0,
        causal: bool = True,
    ) -> FloatArray:
        """One layer's attention of `query` new tokens a sequence over `context` cached ones and themselves."""
        self._check_kv(kv_dtype)
        kernel = work.context_attention(
            batch, query, context, heads, kv_heads, head_dim, window, kv_dtype, causal=causal
        )
        return self._seconds("context_attention", kv_dtype, kernel)

    def decode_attention(
        self,
        *,
        batch: Numbers,
        context: Numbers,
        heads: Numbers,
        kv_heads: Numbers,
        head_dim: Numbers,
        kv_dtype: str = "bf16",
        window: Numbers = 0,
    ) -> FloatArray:
        """One layer's attention of one new token a sequence over `context` cached ones."""
        self._check_kv(kv_dtype)
        kernel = work.decode_attention(batch, context, heads, kv_heads, head_dim, window, kv_dtype)
        return self._seconds("decode_attention", kv_dtype, kernel)

    def mla_context(
        self,
        *,
        batch: Numbers,
        query: Numbers,
        context: Numbers = 0,
        heads: Numbers,
        qk_nope: Numbers = 128,
        qk_rope: Numbers = 64,
        v_head: Numbers = 128,
        kv_dtype: str = "bf16",
    ) -> FloatArray:
        """One layer's latent attention of a prompt: the core alone; the projections are GEMMs."""
        self._check_kv(kv_dtype)
        kernel = work.mla_context(batch, query, context, heads, np.add(qk_nope, qk_rope), v_head)
        return self._seconds("mla_context", kv_dtype, kernel)

    def mla_decode(
        self,
        *,
        batch: Numbers,
        context: Numbers,
        heads: Numbers,
        kv_lora_rank: Numbers = 512,
        qk_rope: Numbers = 64,
        kv_dtype: str = "bf16",
    ) -> FloatArray:
        """One layer's latent attention of one new token a sequence: the core alone, absorbed."""
        self._check_kv(kv_dtype)
        kernel = work.mla_decode(batch, context, heads, kv_lora_rank, qk_rope, kv_dtype)
        return self._seconds("mla_decode", kv_dtype, kernel)

    def experts(
        self,
        *,
        tokens: Numbers,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        ep: Numbers = 1,
        tp: Numbers = 1,
        dtype: str = "bf16",
        skew: Skew = "balanced",
        gated: bool = True,
    ) -> FloatArray:
        """The grouped GEMMs of one rank's experts with their activation; `tokens` are those of the whole expert-parallel group.

        `skew` is the router's: even, or a power law with exponent 1.01 ("power_law") or 1.2, as the slowest rank sees it.
        """
        self._check(dtype)
        kernel = work.experts(tokens, hidden, intermediate, num_experts, top_k, ep, tp, dtype, skew, gated=gated)
        seconds = self._seconds("experts", dtype, kernel)
        found = self._find("experts", dtype) if not self._exact else None
        shape = (hidden, intermediate, num_experts, top_k)
        if found is None or found.correction is None or shape not in found.shapes:
            return seconds
        place = 2.0 ** found.shapes[shape]
        return np.asarray(seconds * found.correction.factor((place, kernel.point[1], kernel.point[2])))[()]

    def linear_attention(
        self,
        *,
        batch: Numbers,
        query: Numbers = 1,
        k_heads: Numbers,
        v_heads: Numbers,
        head_k_dim: int = 128,
        head_v_dim: int = 128,
    ) -> FloatArray:
        """One layer's short convolution and gated delta rule: a prompt of `query` tokens a sequence, or one decode step (1).

        For Mamba 2 (v_heads its heads, k_heads its groups, head_k_dim the state, head_v_dim the head) the same shares are taken:
        the tables have its convolution alone.
        """
        kernel = work.gated_delta_rule(batch, query, k_heads, v_heads, head_k_dim, head_v_dim)
        return self._seconds("linear_attention", "bf16", kernel)

    def memory_bound(self, read_bytes: Numbers, write_bytes: Numbers = 0) -> FloatArray:
        """One element-wise or norm kernel that reads and writes so many bytes."""
        return self._seconds("memory_bound", "bf16", work.element_wise(np.add(read_bytes, write_bytes)))

    def expert_exchange(
        self,
        phase: Literal["dispatch", "combine"],
        *,
        tokens: Numbers,
        hidden: Numbers,
        top_k: Numbers,
        ranks: Numbers,
        mode: Literal["normal", "low_latency"] = "normal",
    ) -> FloatArray:
        """DeepEP's all-to-all within an NVLink domain: `tokens` of each rank go to their top_k experts (8 bits), or come back (16)."""
        sent = work.expert_exchange_bytes(phase, tokens, hidden, top_k, ranks)
        if self._exact:
            return np.asarray(sent / self._link)[()]
        found = self._find(f"exchange_{mode}", phase)
        if found is None:
            return np.asarray(sent / (self._link * _SHARE) + 20e-6)[()]
        return np.asarray((sent / self._link + work.FIXED_SECONDS) * found.grid.factor((tokens, hidden, top_k)))[()]

    def collective(
        self, kind: Collective, bytes: Numbers, ranks: Numbers, *, kernel: Literal["nccl", "custom"] = "nccl"
    ) -> FloatArray:
        """One collective within an NVLink or PCIe domain. `bytes` is the whole tensor: what all-gather gives to each rank, what
        reduce-scatter and all-reduce take from each, what one rank of an all-to-all has for all others and itself, or a message."""
        sent = work.collective_bytes(kind, bytes, ranks)
        if self._exact:
            return np.asarray(sent / self._link)[()]
        found = self._find(kernel, kind) if kernel == "custom" else None
        found = found or self._find("nccl", "all_gather" if kind == "send" else kind)
        base = sent / self._link + work.FIXED_SECONDS
        if found is None:
            return np.asarray(sent / (self._link * _SHARE) + 10e-6)[()]
        point = (np.multiply(bytes, 2), 2) if kind == "send" else (bytes, ranks)
        seconds = base * found.grid.factor(point)
        return np.asarray(np.where(np.asarray(ranks) > 1, seconds, 0.0))[()]

    def error(self, kind: str, dtype: str = "bf16") -> tuple[float, float]:
        """The median and the 90th percentile of the relative error: on shapes held out of the table; where a relative's stands in,
        what that costs on GPUs that have both. `dtype` of "nccl" and "custom" is the operation."""
        if self._exact:
            return _pair(index()["roofline"].get(kind))
        found = self._find(kind, dtype)
        if found is None or found.gpu != self.gpu.name:
            return _pair(index()["relation"].get(kind) if found else None)
        return found.error

    @property
    def _link(self) -> float:
        link = self.gpu.link_bandwidth or self.gpu.pcie_bandwidth
        if link is None:
            raise InputError.of(
                "gpu", self.gpu.name, "no source gives the bandwidth between GPUs; --intra-GBps gives one"
            )
        return link

    def _find(self, kind: str, dtype: str) -> Table | None:
        return next((found for name in self._relatives if (found := table(name, kind, dtype, self.engine))), None)

    def _seconds(self, kind: str, dtype: str, kernel: Work) -> FloatArray:
        peak = self._peak(kernel.peak)
        if self._exact:
            return kernel.seconds(peak, self._bandwidth, 0.0)[()]
        found = self._find(kind, dtype) or self._find(kind, "bf16")
        if found is None:
            return kernel.seconds(peak * _SHARE, self._bandwidth * _SHARE)[()]
        return np.asarray(kernel.seconds(peak, self._bandwidth) * found.grid.factor(kernel.point))[()]

    def _peak(self, kind: str) -> float:
        """FLOP/s of that number format (of none: a kernel that only moves bytes); what lacks bf16 runs fp16."""
        if not kind:
            return math.inf
        peak = self.gpu.peak_flops(kind) or (self.gpu.peak_flops("fp16") if kind == "bf16" else None)
        if peak is None:
            raise InputError.of("gpu", self.gpu.name, f"{self.gpu.why_no_peak(kind)}; --gpu-tflops gives one")
        return peak if self._exact else peak * self._of_peak

    def _check(self, dtype: str) -> None:
        if dtype not in FORMATS:
            raise InputError.of("dtype", dtype, f"it must be one of {', '.join(FORMATS)}")
        lacks = self.gpu.lacks(FORMATS[dtype].peak)
        if lacks and FORMATS[dtype].peak != "bf16":  # 16 bits: what lacks bf16 runs fp16
            runs = ", ".join(name for name, kind in FORMATS.items() if not self.gpu.lacks(kind.peak))
            raise InputError.of("dtype", dtype, f"{lacks}; it runs {runs}")

    def _check_kv(self, dtype: str) -> None:
        if dtype not in KV_BYTES:
            raise InputError.of("kv_dtype", dtype, f"it must be one of {', '.join(KV_BYTES)}")


def _pair(found: list[float] | None) -> tuple[float, float]:
    return (found[0], found[1]) if found else _UNKNOWN_ERROR


def kernel_times(gpu: Gpu, source: Source = "measured", engine: Engine | None = None) -> KernelTimes:
    """The kernels of a GPU by source: "measured" (public tables of that GPU, or its nearest relative's shares of this GPU's peaks),
    "calibrated" (the user's own measurements where they exist) or "roofline"; `engine` says whose kernels, None the best kept."""
    return _calibrated(gpu, engine) if source == "calibrated" else _kept(gpu, source, engine)


@lru_cache(maxsize=64)
def _kept(gpu: Gpu, source: Source, engine: Engine | None) -> KernelTimes:
    return KernelTimes(gpu, source, engine)


def _calibrated(gpu: Gpu, engine: Engine | None) -> KernelTimes:
    """By the user's own matmul and copy rates on that GPU; the public tables alone where nothing was measured."""
    from calc.measurements.calibration import Calibration, of_records

    figures = tuple(
        each for each in of_records(gpu).figures if each.name in ("compute_efficiency", "bandwidth_efficiency")
    )
    return KernelTimes(gpu, "measured", engine, Calibration(gpu.name, figures))
