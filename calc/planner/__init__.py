"""The best layout of a training run on so many GPUs: all that are valid, those that fit, ranked."""

from calc.planner.plan import SearchPlan
from calc.planner.search import Layout, SearchAnswer, search

__all__ = ["Layout", "SearchAnswer", "SearchPlan", "search"]
