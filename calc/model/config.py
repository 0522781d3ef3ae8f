"""From a config.json to a ModelSpec, or to one clear refusal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from calc.errors import InputError
from calc.model.defaults import class_defaults
from calc.model.families.names import Reading, fallback, reading
from calc.model.fields import Fields
from calc.model.spec import ModelSpec
from calc.quantization.declared import declared

LARGEST_CONFIG: Final = 2 * 2**20  # bytes; the largest config.json in use is under 100 KiB


def parse_config(text: str | bytes) -> dict[str, Any]:
    """The JSON object of a config.json. InputError when it is too large, not JSON, or not an object. NaN is refused; Infinity, which
    published configs of Mamba 2 hold as a limit, is a number that no size can be."""
    if len(text) > LARGEST_CONFIG:
        raise InputError(
            f"config: {len(text):,} bytes is too large; a config.json has at most {LARGEST_CONFIG:,}", "config"
        )

    def constant(name: str) -> float:
        if name == "NaN":
            raise InputError.of("config", name, "JSON has no such number")
        return float(name)

    try:
        data = json.loads(text, parse_constant=constant)
    except InputError:
        raise
    except RecursionError:
        raise InputError("config: nested too deeply to be a config.json", "config") from None
    except ValueError as error:
        raise InputError(f"config: not JSON ({error}); give the text of a config.json", "config") from None
    if not isinstance(data, dict):
        raise InputError.of("config", data, "it must be a JSON object, the text of a config.json")
    return data


def from_config(config: Mapping[str, Any], name: str = "model") -> ModelSpec:
    """The spec of a config.json. InputError names the field, its value and what is allowed; an unsupported class by its name."""
    found = reading(config)
    try:
        spec, fields = _read(found)
    except InputError as error:
        found = fallback(config, found, error)
        spec, fields = _read(found)
    if config.get("architectures") is None:
        fields.assumptions.append(f"architectures = {found.name} (not in the config; what its model_type stands for)")
    quantization = declared(config)
    return replace(
        spec,
        name=name,
        architecture=found.architecture,
        source=found.family.source,
        url=found.family.url,
        assumptions=tuple(dict.fromkeys((*spec.assumptions, *fields.assumptions))),
        unread=tuple(fields.unread()),
        quantization=quantization,
        notes=(*found.notes, *spec.notes, *(quantization.notes if quantization else ())),
    )


def _read(found: Reading) -> tuple[ModelSpec, Fields]:
    fields = Fields(found.data, defaults=class_defaults().get(found.known))
    fields.assumptions += found.assumptions
    return found.family.read(fields), fields
