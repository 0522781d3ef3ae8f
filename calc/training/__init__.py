"""Training memory: states, activations and the peak of one step, for any layout and recipe."""

from calc.training.answer import TrainingAnswer, train
from calc.training.plan import TrainingPlan

__all__ = ["TrainingAnswer", "TrainingPlan", "train"]
