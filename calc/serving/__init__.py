"""Serving: the KV cache, the weights in their formats, what fits on a GPU, and how fast it answers.

What the package offers is imported when it is asked for: `params` reads the weights' formats, and not the tables of serving speed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calc.serving.advice import ServingSuggestions, serve_and_suggest
    from calc.serving.answer import ServingAnswer, serve
    from calc.serving.plan import ServingPlan

__all__ = ["ServingAnswer", "ServingPlan", "ServingSuggestions", "serve", "serve_and_suggest"]
_PLACES = {
    "ServingAnswer": "answer",
    "ServingPlan": "plan",
    "ServingSuggestions": "advice",
    "serve": "answer",
    "serve_and_suggest": "advice",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
