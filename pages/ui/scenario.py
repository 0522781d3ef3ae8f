"""The scenario: which model on which GPUs, and every plan about it, as one set of values that the session keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, TypeVar

import streamlit as st
from pydantic import BaseModel, ConfigDict
from pydantic import Field as described

from calc.catalogue import load
from calc.commands import COMMANDS, Command, command_line
from calc.errors import InputError, validated
from calc.hardware import Gpu, chosen_gpu
from calc.model.config import from_config, parse_config
from calc.model.spec import ModelSpec
from calc.sources.find import ON_HUB
from calc.sources.hub import needed_id
from calc.training import TrainingPlan
from pages.ui import hub_models, names
from pages.ui.appearance import CUSTOM, HUB
from pages.ui.fields import Field, fields_of, register

Plan = TypeVar("Plan", bound=BaseModel)

_STATE: Final = "scenario"
WIDGET: Final = " widget"  # ends the session's key of a widget
_CONFIG: Final = "config"  # the key of a config.json of the user's own, as text
SPREAD: Final = ("dp", "tp", "pp", "cp", "dp_replicate", "zero")  # the fields that a layout chosen here sets


class Subject(BaseModel):
    """Model and machine, by name; a figure of the user's own wins over the catalogue's."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = described("meta-llama-3.1-8b", description="Type to search the names.")
    hub_id: str | None = described(
        None,
        max_length=300,
        description="`owner/name` or `owner/name@revision`. Its config.json is fetched and kept in Hugging Face's cache.",
    )
    gpu: str = described("h200-141gb", description="Type to search the names.")
    gpu_memory_gib: float | None = described(
        None, ge=0.001, le=1e6, description="As the driver shows it, in GiB (2³⁰ bytes)."
    )
    gpu_tflops: float | None = described(
        None, ge=0.001, le=1e9, description="Dense, never with sparsity, in 10¹² FLOP/s."
    )
    gpu_GBps: float | None = described(None, ge=0.001, le=1e9, description="In 10⁹ bytes a second.")


class Spread(BaseModel):
    """How many GPUs train, and who lays the model out over them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus: int = described(1, ge=1, le=10_000_000, description="number of GPUs")
    layout: Literal["auto", "by hand"] = described(
        "auto",
        description="auto: FSDP (ZeRO-3) over all GPUs; by hand: the degrees below, whose product is the number of GPUs",
    )


class View(BaseModel):
    """How answers are shown."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    calibrated: Literal["off", "point", "bound"] = described(
        "off",
        description="Put what was measured or imported for this GPU in place of what is assumed: the median, or the conservative "
        "end. Only fields that are left at their default change, and the page says where each figure is from.",
    )
    units: Literal["GiB", "GB"] = described(
        "GiB", description="GiB is 2³⁰ bytes, GB is 10⁹. Downloads carry exact bytes."
    )


SHARED: Final = (Subject, Spread, View)
register([*SHARED, *(command.plan for command in COMMANDS.values())])

# what the app starts with, where it is not the plan's own default: full fine-tuning as people run it, in mixed precision
START: Final[Mapping[str, Any]] = {
    "recipe": "amp",
    "recompute": "full",
    "optimizer_kernel": "fused",
    "tokens": 10**12,
    "output": 512,
}


class Missing(InputError):
    """The scenario waits for something that only the user has; not a mistake."""


@dataclass(frozen=True, eq=False)
class Scenario:
    """One scenario: values by field key; what is not there has its start value."""

    values: Mapping[str, Any]

    def value(self, field: Field) -> Any:
        """The value of a field."""
        return self.values.get(field.key, start(field))

    def of(self, plan: type[Plan]) -> Plan:
        """The plan that the values describe. InputError when its fields do not go together."""
        given = {name: self.value(field) for name, field in fields_of(plan).items()}
        if issubclass(plan, TrainingPlan) and self.layout == "auto":
            given |= spread(self.gpus)
        return validated(plan, given)

    @property
    def gpus(self) -> int:
        return int(self.value(fields_of(Spread)["gpus"]))

    @property
    def layout(self) -> str:
        return str(self.value(fields_of(Spread)["layout"]))

    @property
    def subject(self) -> Subject:
        return self.of(Subject)

    @property
    def config(self) -> str:
        """The user's own config.json as text; "" where there is none."""
        return str(self.values.get(_CONFIG, ""))

    @property
    def model(self) -> str:
        """The model's id: the catalogue's, or its id on the Hub."""
        subject = self.subject
        return (subject.hub_id or HUB) if subject.model == HUB else subject.model

    @property
    def model_name(self) -> str:
        """The model as people call it."""
        return names.MODELS.get(self.model, self.model) if self.model != CUSTOM else "My model"

    @property
    def gpu_name(self) -> str:
        """The GPU as people call it."""
        return names.DEVICES[self.subject.gpu] if self.subject.gpu != CUSTOM else "My GPU"

    def spec(self) -> ModelSpec:
        """The model. InputError when the user's config or id is not one, Missing when there is none yet."""
        subject = self.subject
        if subject.model == HUB:
            if not subject.hub_id:
                raise Missing("This scenario has a model of the Hugging Face Hub: give its id.")
            if not hub_models.is_asked_for(needed_id(subject.hub_id)):
                raise Missing(
                    "This scenario has a model of the Hugging Face Hub. Nothing is fetched before you press Ask the Hub."
                )
            return hub_models.spec(subject.hub_id)
        if subject.model != CUSTOM:
            return load(subject.model)
        if not self.config:
            raise Missing("This scenario has a model of your own: paste or upload its config.json.")
        return _parsed(self.config)

    def gpu(self) -> Gpu:
        """The GPU, with the user's figures put in; Missing when it is to be described and is not."""
        given = self.subject
        name = None if given.gpu == CUSTOM else given.gpu
        found = chosen_gpu(name, given.gpu_memory_gib, given.gpu_tflops, given.gpu_GBps)
        if found is None:
            raise Missing("This scenario has a GPU of your own: give its memory, peak and bandwidth.")
        return found

    def model_argument(self) -> str:
        """The model as the command line takes it; an id of the Hub as one that is never a path there."""
        if self.subject.model == HUB:
            return f"{ON_HUB}{self.model}"
        return "config.json" if self.subject.model == CUSTOM else self.model

    def command_line(self, command: Command, plan: BaseModel, program: str = "calc", model: str = "") -> str:
        """The equal command, ready for a shell."""
        flags: dict[str, Any] = self.subject.model_dump(exclude={"model", "hub_id"})
        gpu = {name: None if value == CUSTOM else value for name, value in flags.items()}
        return command_line(command, plan, model or self.model_argument(), gpu, program)

    def changed(self, values: Mapping[str, Any]) -> Scenario:
        """The scenario with other values, by field key. Degrees of parallelism that are set make the layout one by hand."""
        values = dict(values)
        if self.layout == "auto" and "layout" not in values and set(values) & set(SPREAD):
            values = {**spread(int(values.get("gpus", self.gpus))), "layout": "by hand", **values}
        return Scenario({**self.values, **values})


def spread(gpus: int) -> dict[str, Any]:
    """The layout `auto`: fully sharded data parallelism over all GPUs."""
    return {"dp": gpus, "tp": 1, "pp": 1, "cp": 1, "dp_replicate": 1, "zero": 3 if gpus > 1 else 0}


def start(field: Field) -> Any:
    """What a field starts with: the app's own choice, or the plan's default."""
    return START.get(field.key, field.default)


@lru_cache(maxsize=8)
def _parsed(text: str) -> ModelSpec:
    return from_config(parse_config(text), CUSTOM)


def current() -> Scenario:
    """The scenario of this session."""
    return Scenario(st.session_state.get(_STATE, {}))


def keep(scenario: Scenario) -> None:
    """Make it the session's."""
    st.session_state[_STATE] = dict(scenario.values)


def forget_widgets() -> None:
    """Let every widget show its field's value anew."""
    for key in [key for key in st.session_state if str(key).endswith(WIDGET)]:
        del st.session_state[key]


def keep_config(text: str) -> None:
    """Keep the user's own config.json with the scenario."""
    keep(Scenario({**current().values, _CONFIG: text}))


def view() -> View:
    """How answers are shown in this session."""
    return current().of(View)
