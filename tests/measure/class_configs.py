"""The configs that transformers' classes give of themselves."""

from __future__ import annotations

from typing import Any


def default_config(name: str) -> dict[str, Any]:
    """config.json of a class without any value given: its defaults, and its name."""
    import transformers

    kind = getattr(transformers, name)
    given = {key: value for key, value in kind.config_class().to_dict().items() if value is not None}
    return {**given, "architectures": [kind.__name__]}
