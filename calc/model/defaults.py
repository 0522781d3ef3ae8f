"""What a model class takes for a field that its config leaves out, as transformers defines it."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any


@lru_cache(maxsize=1)
def class_defaults() -> dict[str, dict[str, dict[str, Any]]]:
    """What transformers' config classes take for a field that is not given: architecture -> section ("" = the top) -> field."""
    path = Path(__file__).parent.parent / "data" / "class_defaults.json"
    loaded: dict[str, dict[str, dict[str, Any]]] = json.loads(path.read_text())["defaults"]
    return loaded
