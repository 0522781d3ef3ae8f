"""The scenario: which model on which GPU, once or twice side by side; chosen in the sidebar, carried by the URL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar

import streamlit as st
from pydantic import BaseModel, ConfigDict, Field

from calc.catalogue import load
from calc.errors import InputError
from calc.hardware import Gpu, chosen_gpu
from calc.model.config import from_config, parse_config
from calc.model.spec import ModelSpec
from pages.ui import hub
from pages.ui.field_display import CUSTOM, HUB

SECOND = "b_"  # the prefix of the second scenario's names
PREFIXES = ("", SECOND)

Held = TypeVar("Held", bound=BaseModel)


class Subject(BaseModel):
    """Model and machine, by name; a figure of the user's own wins over the catalogue's."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field(
        "llama-2-7b",
        description="Type to search. `hugging-face` takes any other model's id, `custom` its config.json.",
    )
    hub_id: str | None = Field(
        None,
        max_length=300,
        description="`owner/name` or `owner/name@revision`. Its config.json is fetched and kept in Hugging Face's cache.",
    )
    gpu: str = Field("h100-sxm-80gb", description="Type to search. `custom` is described by the figures below.")
    gpu_memory_gib: float | None = Field(
        None, ge=0.001, le=1e6, description="As the driver shows it, in GiB (2³⁰ bytes)."
    )
    gpu_tflops: float | None = Field(None, ge=0.001, le=1e9, description="Dense, never with sparsity, in 10¹² FLOP/s.")
    gpu_GBps: float | None = Field(None, ge=0.001, le=1e9, description="In 10⁹ bytes a second.")


class View(BaseModel):
    """How answers are shown."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    compare: bool = Field(False, description="A second model, GPU and plan to compare with the first.")
    calibrated: Literal["off", "point", "bound"] = Field(
        "off",
        description="Put what was measured or imported for this GPU in place of what is assumed: the median, or the careful end. "
        "Only fields that are left at their default change, and the page says where each figure is from.",
    )
    units: Literal["GiB", "GB"] = Field("GiB", description="GiB is 2³⁰ bytes, GB is 10⁹. Downloads carry exact bytes.")


class Missing(InputError):
    """The scenario waits for something that only the user has; not a mistake."""


@dataclass(frozen=True, slots=True)
class Side:
    """One scenario of the one or two on the page."""

    prefix: str
    subject: Subject

    @property
    def model(self) -> str:
        """The model's name: the catalogue's, or its id on the Hub."""
        return (self.subject.hub_id or HUB) if self.subject.model == HUB else self.subject.model

    def spec(self) -> ModelSpec:
        """The model. InputError when the user's config or id is not one, Missing when there is none yet."""
        if self.subject.model == HUB:
            return hub.spec(self._hub_id())
        if self.subject.model != CUSTOM:
            return load(self.subject.model)
        text = _own_config(self.prefix)
        if not text:
            raise Missing(
                "This scenario has a model of your own. A config.json does not fit in a link: paste or upload it in the sidebar."
            )
        return _parsed(text)

    def _hub_id(self) -> str:
        if not self.subject.hub_id:
            raise Missing("This scenario has a model of the Hugging Face Hub: give its id in the sidebar.")
        return self.subject.hub_id

    def gpu(self) -> Gpu:
        """The GPU, with the user's figures put in; Missing when it is to be described and is not."""
        given = self.subject
        name = None if given.gpu == CUSTOM else given.gpu
        found = chosen_gpu(name, given.gpu_memory_gib, given.gpu_tflops, given.gpu_GBps)
        if found is None:
            raise Missing("This scenario has a GPU of your own: give its memory, peak and bandwidth in the sidebar.")
        return found

    def gpu_flags(self) -> Mapping[str, str | float | None]:
        """The GPU as the command line takes it."""
        flags: dict[str, Any] = self.subject.model_dump(exclude={"model", "hub_id"})
        return {name: None if value == CUSTOM else value for name, value in flags.items()}

    def model_argument(self) -> str:
        """The model as the command line takes it."""
        return "config.json" if self.subject.model == CUSTOM else self.model

    def own_config(self) -> bytes:
        """The user's config.json; b"" for a model that has a name."""
        text = _own_config(self.prefix) if self.subject.model == CUSTOM else b""
        return text.encode() if isinstance(text, str) else text


def sides() -> list[Side]:
    """The scenarios of the page, as the sidebar's widgets hold them."""
    prefixes = PREFIXES if st.session_state["compare"] else PREFIXES[:1]
    return [Side(prefix, _held(Subject, prefix)) for prefix in prefixes]


def view() -> View:
    """How answers are shown, as the sidebar's widgets hold it."""
    return _held(View, "")


def _held(model: type[Held], prefix: str) -> Held:
    """What the widgets hold, not yet checked: each answer checks what it uses."""
    drawn = {name: st.session_state[prefix + name] for name in model.model_fields if prefix + name in st.session_state}
    return model.model_construct(**drawn)


@lru_cache(maxsize=4)
def _parsed(text: str | bytes) -> ModelSpec:
    return from_config(parse_config(text), CUSTOM)


def _own_config(prefix: str) -> str | bytes:
    upload = st.session_state.get(f"{prefix}config_file")
    return upload.getvalue() if upload else str(st.session_state.get(f"{prefix}config_text") or "")
