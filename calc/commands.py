"""The questions by name: which plan each takes, which function answers it, and how it is written on a command line.

The command line and the pages read the same table, so a flag, a widget and a URL parameter are one field of one plan.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import UnionType
from typing import Any, Literal, Protocol, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from calc.breakdown import Breakdown
from calc.hardware import Gpu
from calc.model.spec import ModelSpec


class Answer(Protocol):
    """What every question returns: a breakdown, and the JSON of the command line."""

    @property
    def breakdown(self) -> Breakdown: ...

    def as_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Command:
    """One question. Its modules are imported when it is asked, so that the command line starts at once."""

    name: str
    help: str
    module: str
    plan_name: str
    function: str
    takes_model: bool = True
    takes_gpu: bool = True
    stored: tuple[str, str] | None = None  # module and function that also look at what MODEL's files store
    suggests: str = ""  # the function that also says what would help, asked for by --suggest

    @property
    def plan(self) -> type[BaseModel]:
        """The pydantic class of the plan."""
        plan: type[BaseModel] = getattr(import_module(self.module), self.plan_name)
        return plan

    def answer(self, plan: BaseModel, spec: ModelSpec | None = None, gpu: Gpu | None = None) -> Answer:
        """Ask: with a model and a GPU where the question takes them. InputError when they do not go together."""
        function = getattr(import_module(self.module), self.function)
        given: list[Any] = [spec] if self.takes_model else []
        given.append(plan)
        if self.takes_gpu:
            given.append(gpu)
        answer: Answer = function(*given)
        return answer

    def answer_with_stored(self, plan: BaseModel, model: str) -> Answer:
        """Ask about MODEL itself, its files included. Only where `stored` names the function."""
        assert self.stored
        module, function = self.stored
        answer: Answer = getattr(import_module(module), function)(model, plan)
        return answer


_TABLE = (
    Command(
        "params",
        "count parameters by component",
        "calc.parameters",
        "ParametersPlan",
        "parameters",
        takes_gpu=False,
        stored=("calc.stored", "stored_parameters"),
    ),
    Command(
        "train",
        "memory of a training step, by device and phase",
        "calc.training",
        "TrainingPlan",
        "train",
        suggests="train_and_suggest",
    ),
    Command(
        "serve",
        "KV cache, weights and what fits when serving",
        "calc.serving",
        "ServingPlan",
        "serve",
        suggests="serve_and_suggest",
    ),
    Command(
        "simulate",
        "a stream of requests through replicas: tail latencies, waste, fleets",
        "calc.serving.simulation",
        "SimulationPlan",
        "simulate_serving",
    ),
    Command("compute", "FLOPs, training time, cost and energy", "calc.compute", "ComputePlan", "compute"),
    Command(
        "time", "seconds of a training step, by part, and what a run costs", "calc.step_time", "TimePlan", "step_time"
    ),
    Command("plan", "the best layout for a model on so many GPUs", "calc.planner", "SearchPlan", "search"),
    Command(
        "plan-serving",
        "the best layout for a service on so many GPUs, or for so many users",
        "calc.planner.serving_layouts",
        "ServingSearchPlan",
        "search_serving",
    ),
    Command(
        "communication",
        "collectives of a training step, by group and time",
        "calc.communication",
        "CommunicationPlan",
        "communication",
    ),
    Command(
        "pipeline",
        "utilisation and timeline of a pipeline schedule",
        "calc.pipeline",
        "PipelinePlan",
        "simulate",
        takes_model=False,
        takes_gpu=False,
    ),
    Command(
        "scaling",
        "compute-optimal size and tokens, and the loss",
        "calc.scaling",
        "ScalingPlan",
        "scaling",
        takes_model=False,
        takes_gpu=False,
    ),
)
COMMANDS: Mapping[str, Command] = {command.name: command for command in _TABLE}


def flag(field: str) -> str:
    """A plan's field as a flag: `micro_batch` is `--micro-batch`."""
    return "--" + field.replace("_", "-")


def choices(field: FieldInfo) -> tuple[Any, ...]:
    """The allowed values of a field whose type is a Literal, else ()."""
    return next((get_args(kind) for kind in _kinds(field.annotation) if get_origin(kind) is Literal), ())


def is_whole(field: FieldInfo) -> bool:
    """Whether the field is a whole number (or unset)."""
    return int in _kinds(field.annotation)


def is_switch(field: FieldInfo) -> bool:
    """Whether the field is true or false (or unset)."""
    return bool in _kinds(field.annotation)


def without_effect(plan: BaseModel) -> dict[str, str]:
    """The fields that were given and change nothing with the others as they are, each with the reason. A plan may name them in `idle`."""
    idle: Mapping[str, str] = getattr(plan, "idle", {})
    return {name: reason for name, reason in idle.items() if name in plan.model_fields_set}


def _kinds(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (UnionType, Union):
        return get_args(annotation)
    return (annotation,)


def command_line(
    command: Command,
    plan: BaseModel,
    model: str = "",
    gpu: Mapping[str, str | float | None] | None = None,
    program: str = "calc",
) -> str:
    """The equal command, ready for a POSIX shell: only what differs from the defaults.

    `gpu` holds the GPU flags by field name (`gpu`, `gpu_memory_gib`, `gpu_tflops`, `gpu_GBps`); None and "" are left out.
    """
    words = ["python", "-m", program, command.name]
    if command.takes_model:
        words.append(model)
    if command.takes_gpu:
        for key, given in (gpu or {}).items():
            words += [flag(key), word(given)] if given not in (None, "") else []
    for name, field in type(plan).model_fields.items():
        value = getattr(plan, name)
        if value == field.get_default(call_default_factory=True):
            continue
        if is_switch(field):
            words.append(flag(name) if value else "--no-" + flag(name)[2:])
        else:
            words += [flag(name), word(value)]
    return shlex.join(words)


def word(value: object) -> str:
    """A value as the command line writes it: 1.0 is `1`, a tuple has commas."""
    if isinstance(value, tuple | list):
        return ",".join(word(part) for part in value)
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
