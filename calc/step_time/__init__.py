"""Seconds of a training step, part by part, and what a run costs."""

from calc.step_time.answer import TimeAnswer, step_time
from calc.step_time.plan import TimePlan

__all__ = ["TimeAnswer", "TimePlan", "step_time"]
