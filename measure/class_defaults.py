"""Writes calc/data/class_defaults.json: what transformers' config classes take for a field that a config.json leaves out.

Run `python -m measure.class_defaults` after an upgrade of transformers; a test compares the file with the installed one.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from calc.model.families import FAMILIES
from calc.model.fields import IGNORED

FILE = Path(__file__).parent.parent / "calc" / "data" / "class_defaults.json"


def class_defaults() -> dict[str, dict[str, dict[str, Any]]]:
    """Architecture -> section ("" is the top level) -> field -> default, for every family that transformers has."""
    import transformers

    found = {name: _sections(getattr(transformers, name)) for name in sorted(FAMILIES) if hasattr(transformers, name)}
    return {name: sections for name, sections in found.items() if any(sections.values())}


def _sections(model_class: Any) -> dict[str, dict[str, Any]]:
    config_class = model_class.config_class
    sections = {"": _fields(config_class)}
    for section, nested in config_class.sub_configs_defaults.items():
        if dataclasses.is_dataclass(nested.config_class):
            sections[section] = _fields(nested.config_class)
    return sections


def _fields(config_class: Any) -> dict[str, Any]:
    """The plain defaults of a config class: numbers, flags, texts and lists that a count may depend on."""
    found = {}
    for field in dataclasses.fields(config_class):
        value = field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        if isinstance(value, tuple):
            value = list(value)
        if isinstance(value, bool | int | float | str | list) and field.name not in IGNORED:
            found[field.name] = value
    pairs = [
        pair for names in config_class.attribute_map.items() for pair in (names, names[::-1])
    ]  # either may be written
    found |= {other: found[name] for other, name in pairs if name in found and other not in IGNORED}
    part = _rotary_part(config_class)
    return found | ({"partial_rotary_factor": part} if part else {})


def _rotary_part(config_class: Any) -> float | None:
    """The part of a head that rotary positions turn, which a class sets when it is made; None where it is all, or none."""
    rope = getattr(config_class(), "rope_parameters", None)
    part = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    return float(part) if isinstance(part, int | float) and part < 1 else None


def text() -> str:
    """The file's text."""
    import transformers

    content = {"source": f"transformers {transformers.__version__}", "defaults": class_defaults()}
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
