"""From a config.json to a ModelSpec, or to one clear refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from calc.errors import InputError
from calc.model.config_text import LARGEST_CONFIG as LARGEST_CONFIG
from calc.model.config_text import parse_config as parse_config
from calc.model.defaults import class_defaults
from calc.model.families.class_names import Reading, fallback, reading
from calc.model.families.other_formats import translated
from calc.model.fields import Fields
from calc.model.positions import scaled_positions
from calc.model.spec import ModelSpec
from calc.quantization.declared import declared


def from_config(config: Mapping[str, Any], name: str = "model") -> ModelSpec:
    """The spec of a config.json. InputError names the field, its value and what is allowed; an unsupported class by its name."""
    config, told = translated(config)
    found = reading(config)
    try:
        spec, fields = _read(found)
    except InputError as error:
        found = fallback(config, found, error)
        spec, fields = _read(found)
    if not told and config.get("architectures") is None:
        fields.assumptions.append(f"architectures = {found.name} (not in the config; what its model_type stands for)")
    quantization = declared(config)
    return replace(
        spec,
        name=name,
        architecture=found.architecture,
        source=found.family.source,
        url=found.family.url,
        assumptions=tuple(dict.fromkeys((*spec.assumptions, *fields.assumptions, *told))),
        unread=tuple(fields.unread()),
        quantization=quantization,
        scaled_positions=scaled_positions(found.data, spec.max_position_embeddings),
        notes=(*found.notes, *spec.notes, *(quantization.notes if quantization else ())),
    )


def _read(found: Reading) -> tuple[ModelSpec, Fields]:
    defaults = class_defaults().get(found.known, {})
    fields = Fields(found.data, where=found.section, defaults={**defaults, found.section: defaults.get("", {})})
    fields.assumptions += found.assumptions
    return found.family.read(fields), fields
