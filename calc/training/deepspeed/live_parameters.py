"""What ZeRO-3 of DeepSpeed holds whole next to its shards while a model runs (partitioned_param_coordinator.py).

The weights of a module are gathered before it runs and released after, but not those that will be used again within
`stage3_max_reuse_distance` elements; the weights of the modules to come are gathered ahead, up to `stage3_prefetch_bucket_size`.
Weights below `stage3_param_persistence_threshold` are never released. One rank gathers nothing: it sees its shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from calc.breakdown import Component, Formula
from calc.training.deepspeed.settings import ZeroSettings

SOURCE: Final = "DeepSpeed 0.12.6, deepspeed/runtime/zero/partitioned_param_coordinator.py"
URL: Final = (
    "https://github.com/deepspeedai/DeepSpeed/blob/v0.12.6/deepspeed/runtime/zero/partitioned_param_coordinator.py"
)


@dataclass(frozen=True, eq=False)
class LiveParameters:
    """The whole weights of a stage's segments, in order: `elements` of each weight of each, of which the small ones persist.

    `recomputes`: backward runs each layer forward again, so that all its weights are live at once. `width`: bytes of a weight.
    """

    settings: ZeroSettings
    elements: tuple[tuple[int, ...], ...]
    ranks: int
    recomputes: bool
    width: int = 2
    waits: bool = False  # no gradient waits whole
    holds_gradients: bool = False
    pool: int = 0  # no stream has buffers of its own

    @property
    def active(self) -> bool:
        return self.ranks > 1

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        """Elements of each segment that come and go."""
        limit = self.settings.stage3_param_persistence_threshold
        return tuple(sum(size for size in sizes if size >= limit) for sizes in self.elements)

    @cached_property
    def _largest(self) -> tuple[int, ...]:
        return tuple(max(sizes, default=0) for sizes in self.elements)

    @cached_property
    def persistent(self) -> int:
        limit = self.settings.stage3_param_persistence_threshold
        return sum(size for sizes in self.elements for size in sizes if size < limit)

    @cached_property
    def _unreleased(self) -> tuple[int, ...]:
        """For each segment, the elements of those before it that forward does not release, for backward needs them soon."""
        visits = 3 if self.recomputes else 2  # of each later weight until backward comes to this one
        after, kept = 0, []
        for size in reversed(self._sizes):
            kept.append(size if visits * after < self.settings.stage3_max_reuse_distance else 0)
            after += size
        sums = [0]
        for size in reversed(kept):
            sums.append(sums[-1] + size)
        return tuple(sums)

    @property
    def kept_bytes(self) -> int:
        """What stays whole from forward to backward."""
        return self.width * (self._unreleased[-1] + self.persistent) if self.active else 0

    def sizes(self, phase: str, index: int, at: str = "block") -> tuple[int, int]:
        """Bytes alive while segment `index` runs, and those of them in another stream's pool: none."""
        return (self.width * sum(self._alive(phase, index).values()) if self.active else 0), 0

    def leaves(self, phase: str, index: int, at: str) -> tuple[Component, ...]:
        """The same as leaves."""
        named = self._alive(phase, index) if self.active else {}
        formula = Formula(rf"{self.width} \cdot <N>", SOURCE, URL)
        return tuple(
            Component(name, self.width * count, formula=formula, numbers={"N": count})
            for name, count in named.items()
            if count
        )

    def _alive(self, phase: str, index: int) -> dict[str, int]:
        whole = phase == "backward" and self.recomputes
        own = self._sizes[index] if whole else min(self._largest[index], self._sizes[index])
        step = 1 if phase == "forward" else -1
        near = self._sizes[index] - own + sum(self._sizes[index + step : index + 3 * step : step] if index else ())
        ahead = min(self.settings.stage3_prefetch_bucket_size, near)
        return {
            "running": own,
            "prefetched": ahead,
            "unreleased": self._unreleased[index],
            "persistent": self.persistent,
        }
