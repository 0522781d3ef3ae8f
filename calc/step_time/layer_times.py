"""Seconds of one layer and of the head on the device: forward, input gradient, weight gradient, and what is computed again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from calc.hardware import Gpu
from calc.kernel_times import KernelTimes
from calc.model.feed_forward import MoE
from calc.step_time.attention_times import attention_seconds
from calc.step_time.machine import ACCUMULATED, half_rows, memory_factors, sustained
from calc.step_time.memory_bound import Traffic, layer_traffic, quantised_format, takes_low_precision
from calc.step_time.operations import Gemm, LayerOperations, Sharding
from calc.step_time.plan import TimePlan

FloatArray = npt.NDArray[np.float64]

FAMILIES: Final = ("gemms", "experts", "attention", "recurrence", "memory_bound")

_KERNELS: Final[Mapping[str, str]] = {
    "bf16": "bf16",
    "fp16": "bf16",
    "fp32": "bf16",  # scaled by the peaks
    "fp8": "fp8",
    "fp8-block": "fp8_block",
    "mxfp8": "fp8",
    "nvfp4": "nvfp4",
}


@dataclass(frozen=True, slots=True)
class Seconds:
    """Device seconds of one pass by family, and the kernels that the host launches for it: experts' own apart."""

    families: Mapping[str, float] = field(default_factory=dict)
    kernels: float = 0.0
    expert_kernels: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.families.values())

    def __add__(self, other: Seconds) -> Seconds:
        names = {**self.families, **other.families}
        merged = {name: self.families.get(name, 0.0) + other.families.get(name, 0.0) for name in names}
        return Seconds(merged, self.kernels + other.kernels, self.expert_kernels + other.expert_kernels)

    def times(self, count: float) -> Seconds:
        scaled = {name: value * count for name, value in self.families.items()}
        return Seconds(scaled, self.kernels * count, self.expert_kernels * count)


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """One layer, one micro-batch. `again`: what the backward computes once more."""

    forward: Seconds
    input_gradient: Seconds
    weight_gradient: Seconds
    again: Seconds


Shape = tuple[float, float, float]
_MOST_KEPT: Final = 100_000


@cache
def _known_products(kernels: KernelTimes, dtype: str) -> dict[Shape, float]:
    """Seconds of the products that were asked for before, by shape."""
    return {}


class LayerTimer:
    """Times the operations of layers under one plan on one GPU."""

    def __init__(self, gpu: Gpu, plan: TimePlan, times: KernelTimes, sharding: Sharding) -> None:
        self.gpu, self.plan, self.kernels, self.sharding = gpu, plan, times, sharding
        self.narrow = _KERNELS[plan.compute_format]
        self.half_rows = half_rows(gpu)
        self.memory, self.permutation, self.loss = memory_factors(times)
        self.caps = {name: self._cap(name) for name in {"bf16", self.narrow}}
        self.rates = {"bf16": 1.0, self.narrow: _rate(self)}

    def _cap(self, dtype: str) -> float:
        """FLOP/s that large products sustain, where a source says; else without bound."""
        found = sustained(self.gpu, dtype)
        return found.tflops * 1e12 if found and self.kernels.source != "roofline" else float("inf")

    def _product(self, m: FloatArray, n: FloatArray, k: FloatArray, dtype: str) -> FloatArray:
        """Seconds of products: as the tables have the shape, and no faster than the power limit sustains.

        In fp8 the tables hold the kernels of serving engines; training runs cuBLASLt, which keeps the 16-bit kernel's share of the peak
        (ml-engineering: B200 0.776 in bf16, 0.763 in fp8).
        """
        flops = 2 * m * n * k
        if dtype == "fp8" and self.kernels.source != "roofline":
            narrow, wide = self.gpu.peak_flops("fp8"), self.gpu.peak_flops("bf16")
            self.kernels.gemm(128, 128, 128, dtype=dtype)  # refuses a GPU without the format
            seconds = self.kernels.gemm(m, n, k) * (wide / narrow if narrow and wide else 0.5)
        else:
            seconds = self.kernels.gemm(m, n, k, dtype=dtype)
        return np.asarray(np.maximum(seconds, flops / self.caps[dtype]))

    def layer(self, operations: LayerOperations) -> LayerSeconds:
        """All passes of one layer."""
        self.prepare(operations.gemms)
        forward, inputs, weights = self._gemms(operations.gemms)
        core_forward, core_backward = attention_seconds(
            operations.cores, self.sharding.tokens, self.plan, self.gpu, self.kernels
        )
        scan = self._scan(operations.scans)
        traffic = layer_traffic(operations, self.plan, self.sharding)
        slower = self.permutation / self.memory
        traffic = tuple(one.scaled(slower) if one.name in ("permutation", "padding") else one for one in traffic)
        moved_forward = self._moved([(one.forward, one.forward_kernels, one.of_experts) for one in traffic])
        moved_backward = self._moved([(one.backward, one.backward_kernels, one.of_experts) for one in traffic])
        cores = len(operations.cores)
        ahead = forward + Seconds({"attention": core_forward, "recurrence": scan}, cores) + moved_forward
        back = inputs + Seconds({"attention": core_backward, "recurrence": 2 * scan}, 2 * cores) + moved_backward
        return LayerSeconds(ahead, back, weights, self._again(operations, ahead, traffic))

    def head(self, gemms: tuple[Gemm, ...], loss: Traffic | None) -> LayerSeconds:
        """The output head with its loss; nothing of it is computed again."""
        self.prepare(gemms)
        forward, inputs, weights = self._gemms(gemms)
        if loss is not None:
            slower = self.loss / self.memory
            forward += self._traffic([(loss.forward * slower, loss.forward_kernels)])
            inputs += self._traffic([(loss.backward * slower, loss.backward_kernels)])
        return LayerSeconds(forward, inputs, weights, Seconds())

    def _gemms(self, gemms: tuple[Gemm, ...]) -> tuple[Seconds, Seconds, Seconds]:
        """Forward, input gradient, weight gradient of products: dense ones and experts' apart."""
        dense = [gemm for gemm in gemms if gemm.part != "experts"]
        experts = [gemm for gemm in gemms if gemm.part == "experts"]
        found = []
        for phase in range(3):
            seconds = {"gemms": self._products(dense, phase), "experts": self._products(experts, phase)}
            frozen = phase == 2 and self.plan.method != "full"
            kernels = sum(gemm.groups for gemm in dense)
            own = sum(gemm.groups for gemm in experts) if self._separate_experts else len(experts)
            found.append(Seconds() if frozen else Seconds(seconds, kernels, own))
        return found[0], found[1], found[2]

    @property
    def _separate_experts(self) -> bool:
        """Whether each expert is a product of its own, or one kernel for all."""
        return self.plan.expert_program == "separate"

    def _products(self, gemms: Iterable[Gemm], phase: int) -> float:
        """Seconds of products in forward (0), for the input's gradient (1) or the weight's (2)."""
        total = 0.0
        accumulates = ACCUMULATED if phase == 2 and self.plan.implementation == "fused" else 1.0
        for gemm in gemms:
            dtype, shape = self._shape(gemm, phase)
            factor = float(gemm.groups)
            if gemm.part == "experts":  # all groups as one product, slowed as few rows a group slow it
                each = gemm.m * self.plan.expert_skew
                half = self.half_rows[phase == 2] * self.rates[dtype]
                factor = (each + half) / each
            total += self._known(dtype)[shape] * factor
        return total * accumulates * self._wide

    def _shape(self, gemm: Gemm, phase: int) -> tuple[str, Shape]:
        """The number format and the shape [m, k] x [k, n] of a product in a phase, as (m, n, k)."""
        dtype = self.narrow if takes_low_precision(gemm) else "bf16"
        m, n, k = gemm.m, gemm.n, gemm.k
        if gemm.part == "experts":
            rows = m * self.plan.expert_skew * gemm.groups
            return dtype, (rows, n, k) if phase == 0 else (rows, k, n)
        return dtype, ((m, n, k), (m, k, n), (n, k, m))[phase]

    def prepare(self, gemms: Iterable[Gemm]) -> None:
        """Look up all products of all phases at once, which is faster than one by one."""
        wanted: dict[str, dict[Shape, None]] = {}
        for gemm in gemms:
            for phase in range(3):
                dtype, shape = self._shape(gemm, phase)
                if shape not in self._known(dtype):
                    wanted.setdefault(dtype, {})[shape] = None
        for dtype, shapes in wanted.items():
            known = self._known(dtype)
            if len(known) > _MOST_KEPT:
                known.clear()
            m, n, k = np.array(list(shapes), dtype=float).T
            known.update(zip(shapes, self._product(m, n, k, dtype).tolist(), strict=True))

    def _known(self, dtype: str) -> dict[Shape, float]:
        return _known_products(self.kernels, dtype)

    @property
    def _wide(self) -> float:
        """fp32 products by the tensor cores' tf32: slower as the peaks say."""
        if self.plan.compute_format != "fp32":
            return 1.0
        narrow = self.gpu.peak_flops("bf16")
        wide = self.gpu.peak_flops("tf32") or self.gpu.peak_flops("fp32")
        return narrow / wide if narrow and wide else 2.0

    def _scan(self, flops: int) -> float:
        """A recurrence's chunked scan: its FLOPs as one square product would run them."""
        if not flops:
            return 0.0
        return float(self.kernels.gemm(self.sharding.tokens, 128, max(1, flops // (256 * self.sharding.tokens))))

    def _traffic(self, moves: Iterable[tuple[float, int]]) -> Seconds:
        """Memory-bound operators: as their bytes, and no kernel under the floor of its launch."""
        found = [(size, count) for size, count in moves if count or size]
        if not found:
            return Seconds()
        sizes, counts = np.array(found, dtype=float).T
        seconds = np.maximum(self.memory * self.kernels.memory_bound(sizes), counts * self.kernels.launch_floor)
        return Seconds({"memory_bound": float(np.sum(seconds))}, float(np.sum(counts)))

    def _moved(self, moves: list[tuple[float, int, bool]]) -> Seconds:
        """The same, with the experts' kernels counted apart."""
        plain = self._traffic((size, count) for size, count, experts in moves if not experts)
        own = self._traffic((size, count) for size, count, experts in moves if experts)
        seconds = plain.families.get("memory_bound", 0.0) + own.families.get("memory_bound", 0.0)
        return Seconds({"memory_bound": seconds}, plain.kernels, own.kernels)

    def _again(self, operations: LayerOperations, forward: Seconds, traffic: tuple[Traffic, ...]) -> Seconds:
        """What the backward computes again: all of the forward, or what the program or the named modules leave out."""
        plan = self.plan
        if plan.recompute == "full":
            return forward.times(1 / plan.recompute_every)
        found = Seconds()
        if plan.recompute == "selective" and plan.implementation == "torchtitan":
            # every second product and all memory-bound operators; attention and collectives are kept (torchtitan's list of operators)
            moved = forward.families["memory_bound"]
            products = forward.families["gemms"] / 2 + forward.families["experts"] / 2
            return Seconds({"gemms": products, "memory_bound": moved}, forward.kernels / 2)
        if plan.recompute == "selective" or "core_attn" in plan.recompute_modules:
            found += Seconds({"attention": forward.families["attention"]}, len(operations.cores))
        for name in plan.recompute_modules:
            found += self._module(name, operations, traffic)
        return found

    def _module(self, name: str, operations: LayerOperations, traffic: tuple[Traffic, ...]) -> Seconds:
        """The forward of one of Megatron's modules, where the layer has it."""
        moe = isinstance(operations.kind.feed_forward, MoE)
        if name == "layernorm":
            return self._traffic((one.forward, one.forward_kernels) for one in traffic if one.name == "norm")
        if (name == "moe_act" and moe) or (name == "mlp" and not moe) or (name == "moe" and moe):
            found = self._traffic((one.forward, one.forward_kernels) for one in traffic if one.name == "activation")
            parts = {"mlp": ("mlp",), "moe": ("experts", "router", "shared_expert")}.get(name, ())
            return found + self._gemms(tuple(gemm for gemm in operations.gemms if gemm.part in parts))[0]
        wanted = {"mla_up_proj": ("query_up", "key_value_up"), "shared_experts": ()}.get(name, ())
        gemms = tuple(
            gemm
            for gemm in operations.gemms
            if gemm.name in wanted or (name == "shared_experts" and gemm.part == "shared_expert")
        )
        return self._gemms(gemms)[0] if gemms else Seconds()


@cache
def _large(kernels: KernelTimes, dtype: str) -> float:
    return float(kernels.gemm(8192, 8192, 8192, dtype=dtype))


def _rate(timer: LayerTimer) -> float:
    """Rate of large products in the narrow format over that in bf16, which stretches what a group's fixed cost is worth in rows."""
    flops = 2 * 8192**3
    wide = max(_large(timer.kernels, "bf16"), flops / timer.caps["bf16"])
    narrow = timer.narrow
    if narrow == "bf16":
        return 1.0
    return wide / max(_large(timer.kernels, narrow), flops / timer.caps[narrow])


def uses_narrow(plan: TimePlan) -> bool:
    """Whether the layers' products run below 16 bits."""
    return quantised_format(plan) is not None
