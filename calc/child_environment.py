"""The environment in which a Python process that this one starts finds Plumbline's packages, wherever it starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(
    __file__
).parent.parent  # holds calc, measure, kernels and pages, in a checkout and where they are installed


def child_environment(
    changes: Mapping[str, str] | None = None, defaults: Mapping[str, str] | None = None
) -> dict[str, str]:
    """This process's environment with Plumbline's folder first on PYTHONPATH; `changes` win over it, it wins over `defaults`."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**(defaults or {}), **os.environ, "PYTHONPATH": path, **(changes or {})}
