"""Serving: the KV cache, the weights in their formats, what fits on a GPU, and how fast it answers."""

from calc.serving.answer import ServingAnswer, serve
from calc.serving.plan import ServingPlan

__all__ = ["ServingAnswer", "ServingPlan", "serve"]
