"""The operations of one decoder layer on a GPU's roofline while it generates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from calc.errors import InputError
from calc.hardware import Gpu

SOURCE: Final = "Williams et al. 2009, Roofline (https://doi.org/10.1145/1498765.1498785)"
_BYTES: Final = 2  # of a number in 16 bits


class LayerRooflinePlan(BaseModel):
    """One step of a batch: each sequence gives one token, which attends to its cached ones. Weights and cache are in 16 bits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden: int = Field(4096, ge=1, le=2**17, description="h: numbers that a token is inside the model")
    query_heads: int = Field(32, ge=1, le=1024, description="a: query heads; they divide h")
    kv_heads: int = Field(8, ge=1, le=1024, description="k: key and value heads; they divide the query heads")
    width: int = Field(14336, ge=1, le=2**19, description="f: width of the gated MLP")
    sequences: int = Field(16, ge=1, le=2**16, description="sequences in the batch")
    cached_tokens: int = Field(4096, ge=1, le=2**20, description="tokens that each sequence has in its cache")


@dataclass(frozen=True, slots=True)
class Operation:
    """Its FLOPs, the bytes it must read and write, and whether the GPU's compute or its memory bounds it."""

    name: str
    flops: int
    bytes: int
    seconds: float
    compute_bound: bool

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes


@dataclass(frozen=True, slots=True)
class Roofline:
    """Peak FLOP/s and bytes/s of the GPU with the operations; `ridge` is the intensity from which compute bounds."""

    peak: float
    bandwidth: float
    operations: tuple[Operation, ...]

    @property
    def ridge(self) -> float:
        """FLOPs a byte at which both take equally long."""
        return self.peak / self.bandwidth

    def attainable(self, intensity: float) -> float:
        """FLOP/s that the GPU can reach at so many FLOPs a byte."""
        return min(self.peak, intensity * self.bandwidth)


def layer_roofline(plan: LayerRooflinePlan, gpu: Gpu) -> Roofline:
    """The five matrix operations of a layer. InputError where heads do not divide, or the GPU's peak or bandwidth is not known."""
    if plan.hidden % plan.query_heads or plan.query_heads % plan.kv_heads:
        raise InputError.of("query_heads", plan.query_heads, "it must divide hidden, and kv_heads must divide it")
    peak, bandwidth = gpu.peak_flops("bf16") or gpu.peak_flops("fp16"), gpu.memory_bandwidth
    if not peak or not bandwidth:
        raise InputError.of("gpu", gpu.name, "a roofline needs its peak in 16 bits and its memory bandwidth")
    head = plan.hidden // plan.query_heads
    batch, both = plan.sequences, 2 * plan.kv_heads * head
    shapes = {
        "query, key and value": (plan.hidden, plan.hidden + both),
        "output of attention": (plan.hidden, plan.hidden),
        "gate and up": (plan.hidden, 2 * plan.width),
        "down": (plan.width, plan.hidden),
    }
    found = [
        (name, 2 * batch * rows * columns, _BYTES * (rows * columns + batch * (rows + columns)))
        for name, (rows, columns) in shapes.items()
    ]
    read = _BYTES * batch * (plan.cached_tokens * both + 2 * plan.hidden)  # keys and values; queries in, result out
    found.insert(1, ("attention", 4 * batch * plan.hidden * plan.cached_tokens, read))
    return Roofline(
        peak,
        bandwidth,
        tuple(
            Operation(name, flops, size, max(flops / peak, size / bandwidth), flops / peak > size / bandwidth)
            for name, flops, size in found
        ),
    )
