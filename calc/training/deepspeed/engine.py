"""Bytes of DeepSpeed's ZeRO optimizer on one rank besides its states, by what its stages make (stage_1_and_2.py, stage3.py).

The trained weights lie in one flat tensor. Gradients leave backward through buckets of a fixed size, into a flat shard. At the step
the shard is flattened and cast to fp32 while the one that backward left is still there; stage 3 does so for one sub-group at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from calc.training.deepspeed.settings import ZeroSettings
from calc.units import ceil_div

FP32, FP64, WIDTH = 4, 8, 2  # bytes; WIDTH of the weights and gradients that the engine trains
SOURCE: Final = "DeepSpeed 0.12.6, deepspeed/runtime/zero/stage_1_and_2.py and stage3.py"
URL: Final = "https://github.com/deepspeedai/DeepSpeed/tree/v0.12.6/deepspeed/runtime/zero"


class EngineBytes(NamedTuple):
    """Bytes besides weights, gradients and optimizer states: always there, through backward alone, and at the step.

    `partition`: the gradients of the micro-batch that runs, until they are added to those of the earlier ones.
    """

    always: int
    backward: int
    partition: int
    step: int


@dataclass(frozen=True)
class Engine:
    """One rank's trained weights: `elements` of each, in the order in which the optimizer has them; `ranks` share them.

    `microbatches` of one step add up. `copies` are the temporaries of the optimizer's kernel, each as large as what it updates at
    once (PyTorch's AdamW: foreach 1, loop 2, fused none, as DeepSpeed's FusedAdam). `host`: the optimizer lives in host memory.
    """

    settings: ZeroSettings
    elements: tuple[int, ...]
    ranks: int
    microbatches: int = 1
    copies: int = 0
    host: bool = False

    @cached_property
    def shard(self) -> int:
        return ceil_div(sum(self.elements), self.ranks)

    @cached_property
    def largest(self) -> int:
        return max(self.elements, default=0)

    @cached_property
    def sub_group(self) -> int:
        """Elements of the largest sub-group of stage 3: weights are added until it has reached `sub_group_size`."""
        largest = size = 0
        for elements in self.elements:
            size += ceil_div(elements, self.ranks)
            largest = max(largest, size)
            if size >= self.settings.sub_group_size:
                size = 0
        return largest

    def bytes(self) -> EngineBytes:
        """The bytes of the engine's stage."""
        return self._stage_3() if self.settings.stage == 3 else self._stages_1_and_2()

    def _stages_1_and_2(self) -> EngineBytes:
        shard, buckets = WIDTH * self.shard, WIDTH * self.settings.buckets
        if self.host:  # gradients leave one by one: a buffer for the largest, and its cast to fp32
            return EngineBytes(WIDTH * self.largest, buckets + FP32 * self.largest, 0, 0)
        left = shard if self.settings.stage == 2 else WIDTH * sum(self.elements)  # by backward, among the gradients
        flattened = 2 * shard + FP32 * self.shard
        norm = shard + FP64 * self.largest  # of one weight's gradient in fp64
        updating = FP32 * self.shard * (1 + self.copies)  # what backward left is gone by then
        partition = shard if self.settings.stage == 2 else 0
        return EngineBytes(0, buckets, partition, max(0, max(flattened, norm, updating) - left))

    def _stage_3(self) -> EngineBytes:
        bucket = WIDTH * self.settings.buckets
        if self.host:
            return EngineBytes(bucket, FP32 * ceil_div(self.largest, self.ranks), 0, 0)
        group = self.sub_group
        return EngineBytes(bucket, 0, 0, max((WIDTH + FP32) * group, FP32 * group * (1 + self.copies)))
