"""Scaling laws of language models: the compute-optimal size and tokens, the loss, over-training, inference and repeated data."""

from calc.scaling.answer import ScalingAnswer, scaling
from calc.scaling.plan import ScalingPlan

__all__ = ["ScalingAnswer", "ScalingPlan", "scaling"]
