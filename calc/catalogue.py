"""The models that come with the product, and the one place that turns MODEL into a config and a spec."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from calc.errors import InputError
from calc.model.config import from_config, parse_config
from calc.model.spec import ModelSpec
from calc.sources.find import Found, find

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the catalogue: where its config was read, and what its Hub page states (None: not found).

    `hub_total` counts what the checkpoint stores, which is often not the parameter count; `note` says why they differ.
    """

    name: str
    hub_id: str
    config_source: str
    hub_total: int | None
    hub_total_source: str
    note: str


@lru_cache(maxsize=1)
def catalogue() -> Mapping[str, Entry]:
    """Every model of the catalogue by name, in the order of the file."""
    rows = json.loads((_DATA / "models.json").read_bytes())
    return {name: Entry(name, **row) for name, row in rows.items()}


def load_config(model: str) -> dict[str, Any]:
    """The raw config of MODEL: a catalogue name, a path, a Hugging Face id, or `-` for standard input.

    InputError when there is no such model, with the closest names.
    """
    if model in catalogue():
        return parse_config((_DATA / "models" / f"{model}.json").read_bytes())
    return look(model).needed_config()


def load(model: str) -> ModelSpec:
    """The spec of MODEL, as `load_config` finds it."""
    return _catalogued(model) if model in catalogue() else look(model).spec()


def look(model: str, stored: bool = False) -> Found:
    """What MODEL is outside the catalogue, and what it stores where that is asked for. InputError when it cannot be had."""
    with _catalogued_name(model):
        found = find(model, stored)
    if found is None:
        raise unknown(model)
    return found


def look_on_hub(model: str, stored: bool = False) -> Found:
    """What the Hub has under an id, and what it stores where that is asked for: never a file of this machine, whatever `model` says.

    Each question to the Hub ends within `calc.sources.hub.SECONDS`. InputError when it cannot be had.
    """
    from calc.sources.hub import SECONDS, Hub, needed_id
    from calc.sources.hub_weights import find_on_hub

    hub_id = needed_id(model)
    with _catalogued_name(hub_id.repo):
        return find_on_hub(hub_id, stored, Hub(stored_seconds=SECONDS))


@contextmanager
def _catalogued_name(model: str) -> Iterator[None]:
    """A complaint about a model that the catalogue has under another name says that name."""
    try:
        yield
    except InputError as error:
        known = next((entry.name for entry in catalogue().values() if entry.hub_id.lower() == model.lower()), None)
        raise InputError(f"{error}; the catalogue has it as {known}", error.field) if known else error from None


def unknown(model: str) -> InputError:
    """That there is no such MODEL, with the closest names."""
    close = get_close_matches(model.lower().rsplit("/", 1)[-1], catalogue(), n=3, cutoff=0.5)
    hint = f"; close names are {', '.join(close)}" if close else ""
    allowed = "a catalogue name, a path, a Hugging Face id (owner/name), or - for standard input"
    return InputError.of("MODEL", model, f"it must be {allowed}{hint}")


@lru_cache(maxsize=256)
def _catalogued(name: str) -> ModelSpec:
    return from_config(load_config(name), name)
