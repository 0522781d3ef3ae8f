"""What pyproject.toml pins, as lines for pip: `python -m tests.requirements [EXTRA ...]` prints them, all when none is named."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAD = "# Made from pyproject.toml by `python -m tests.requirements > requirements.txt`: change it there.\n"


def requirements(extras: Sequence[str] = ()) -> str:
    """The text of a requirements file: the dependencies, and those of the named extras (of every one when none is named)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    parts = {"": project["dependencies"], **{name: optional[name] for name in extras or optional}}
    return HEAD + "".join(f"\n# {name or 'always'}\n" + "".join(f"{one}\n" for one in parts[name]) for name in parts)


if __name__ == "__main__":
    print(requirements(sys.argv[1:]), end="")
