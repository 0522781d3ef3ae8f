"""The settings of DeepSpeed's `zero_optimization` that move memory, under their JSON names, with DeepSpeed's defaults."""

from __future__ import annotations

from typing import Final, NamedTuple

SOURCE: Final = "DeepSpeed 0.12.6, deepspeed/runtime/zero/config.py"
URL: Final = "https://github.com/deepspeedai/DeepSpeed/blob/v0.12.6/deepspeed/runtime/zero/config.py"


class ZeroSettings(NamedTuple):
    """Sizes count elements, as DeepSpeed's JSON does. `overlap_comm` left out: on for stage 3 alone."""

    stage: int
    reduce_bucket_size: int = 500_000_000
    contiguous_gradients: bool = True
    overlap_comm: bool | None = None
    sub_group_size: int = 1_000_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    stage3_param_persistence_threshold: int = 100_000

    @property
    def overlaps(self) -> bool:
        return self.stage == 3 if self.overlap_comm is None else self.overlap_comm

    @property
    def buckets(self) -> int:
        """Elements of the buckets through which gradients leave: two where stage 1 or 2 overlaps communication."""
        if not self.contiguous_gradients:
            return 0
        return self.reduce_bucket_size * (2 if self.overlaps and self.stage < 3 else 1)
