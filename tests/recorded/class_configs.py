"""Default configs of transformers' classes, as recorded or read again."""

from __future__ import annotations

from typing import Any

from tests.measure.class_configs import default_config
from tests.recorded.recording import Recording

CONFIGS = Recording("class_configs", ("tests.measure.class_configs",), ("transformers",), again=2)


def class_config(name: str) -> dict[str, Any]:
    """The config.json that a class has where nothing is given."""
    return CONFIGS.result(name, name, lambda: default_config(name))
