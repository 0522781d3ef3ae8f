"""Training memory: states, activations and the peak of one step, for any layout and recipe."""

from calc.training.advice.suggestions import Suggested, suggest, train_and_suggest
from calc.training.answer import TrainingAnswer, train
from calc.training.plan import TrainingPlan

__all__ = ["Suggested", "TrainingAnswer", "TrainingPlan", "suggest", "train", "train_and_suggest"]
