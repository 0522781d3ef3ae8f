"""How far the model's step times were from published runs, by program and kind: the band around an answer."""

from __future__ import annotations

from typing import Final

from calc.model.feed_forward import MoE
from calc.model.spec import ModelSpec
from calc.step_time.plan import TimePlan

# Measured over predicted seconds of the published runs in tests/published/training_throughput.json: 10th and 90th percentile, and how many
# runs; programs with fewer than ten are left out. The test of that file keeps them in step with the predictions.
RECORD: Final[dict[tuple[str, bool], tuple[float, float, int]]] = {
    ("hf", False): (0.86, 1.11, 103),
    ("torchtitan", False): (0.94, 1.16, 12),
    ("fused", False): (0.87, 1.12, 40),
    ("fused", True): (0.95, 1.22, 30),
}
_UNKNOWN: Final = (0.7, 1.5)


def band(plan: TimePlan, spec: ModelSpec) -> tuple[float, float, str]:
    """Factors from `step_seconds` to its low and high end, and the sentence that says where they are from."""
    experts = any(isinstance(kind.feed_forward, MoE) for kind in spec.layers.kinds)
    kind = "with experts" if experts else "dense"
    found = RECORD.get((plan.implementation, experts))
    if found is None:
        return *_UNKNOWN, f"low and high: no published run of this program, {kind}, is on record; a wide guess"
    low, high, runs = found
    return low, high, f"low and high: between them lie 80 % of {runs} published runs of this program, {kind}"
