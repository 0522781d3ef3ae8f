"""The first page: a sentence, one bar, and a matrix of ways and GPUs whose cells become the scenario."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import streamlit as st
from pydantic import BaseModel, ConfigDict
from pydantic import Field as described

from calc.catalogue import catalogue, load
from calc.commands import COMMANDS
from calc.fit_matrix import Cell, Way, fit_matrix
from calc.hardware import Gpu, gpus
from calc.model.feed_forward import MoE
from calc.model.spec import ModelSpec
from pages.ui import charts, link, names, scenario, sidebar, widgets
from pages.ui.answers import serving, training
from pages.ui.appearance import CUSTOM
from pages.ui.fields import fields_of
from pages.ui.numbers import Numbers
from pages.ui.page import complaints
from pages.ui.presets import WAYS, settings_of, ways_of
from pages.ui.scenario import Scenario, Spread, Subject

TRAIN, SERVE = COMMANDS["train"], COMMANDS["serve"]

Task = Literal["Fine-tune", "Serve"]
_DEVICES: Final = (
    "rtx-4090-24gb", "rtx-5090-32gb", "l40s-48gb", "a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm-80gb", "h200-141gb",
    "b200-180gb", "mi300x-192gb",
)  # fmt: skip
_MODELS: Final = ("qwen3-4b", "meta-llama-3.1-8b", "gpt-oss-20b", "qwen3-30b-a3b", "meta-llama-3.1-70b")
_TIGHT: Final = 0.93  # of the GPU's memory: above, the highest overheads that were reported may not fit


class Sentence(BaseModel):
    """What the sentence of the first page asks first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: Task = described("Fine-tune", description="what the GPU is for")


PLANS: Final = (Sentence, TRAIN.plan, SERVE.plan)

_TRAINED, _SERVED = {"task": "Fine-tune", "gpus": 1, "seq": 8192}, {"task": "Serve", "context": 32768}
_8B, _70B, _4090 = "meta-llama-3.1-8b", "meta-llama-3.1-70b", "rtx-4090-24gb"
_EXAMPLES: Final[Mapping[str, Mapping[str, Any]]] = {
    "QLoRA of 8B on an RTX 4090": {**_TRAINED, "way": "QLoRA", "model": _8B, "gpu": _4090},
    "70B on 64 H100": {**_TRAINED, "way": "full fine-tuning", "model": _70B, "gpu": "h100-sxm-80gb", "gpus": 64},
    "Serve Qwen3 30B A3B in fp8 on an L40S": {**_SERVED, "way": "fp8", "model": "qwen3-30b-a3b", "gpu": "l40s-48gb"},
    "Serve gpt-oss 20B on an RTX 4090": {**_SERVED, "way": "as published", "model": "gpt-oss-20b", "gpu": _4090},
}


def task_of(asked: Scenario) -> str:
    """What the scenario's GPU is for."""
    return str(asked.value(fields_of(Sentence)["task"]))


def _field(name: str, task: str) -> Any:
    plan = TRAIN.plan if task == "Fine-tune" else SERVE.plan
    return fields_of(plan)[name]


def preset_values(way: str, model: str) -> dict[str, Any]:
    """The values that a way sets for a model, by field key."""
    fields = fields_of(COMMANDS[WAYS[way].command].plan)
    return {fields[name].key: value for name, value in settings_of(way, _has_experts(model)).items()}


def _has_experts(model: str) -> bool:
    return model in catalogue() and any(isinstance(kind.feed_forward, MoE) for kind in load(model).layers.kinds)


def way_of(asked: Scenario) -> str | None:
    """The way that the scenario's values are; None where they are no preset's."""
    command = "train" if task_of(asked) == "Fine-tune" else "serve"
    fields = fields_of(COMMANDS[command].plan)
    for name in ways_of(command):
        values = settings_of(name, _has_experts(asked.model))
        if all(asked.value(fields[each]) == value for each, value in values.items()):
            return name
    return None


def show() -> None:
    """Draw the page."""
    with st.sidebar:
        sidebar.more_of_model()
        sidebar.more_of_gpu()
        sidebar.settings()
    _page()


@st.fragment
def _page() -> None:
    widgets.redraw_if_put()
    asked, numbers = scenario.current(), Numbers(scenario.view().units)
    task = task_of(asked)
    _examples()
    _sentence(asked, task)
    with complaints():
        if task == "Fine-tune":
            training.glance(asked, numbers)
        else:
            serving.glance(asked, numbers)
    _matrix(asked, task, numbers)
    link.write()


def _examples() -> None:
    with st.container(horizontal=True, gap="small", key="examples"):
        for name, values in _EXAMPLES.items():
            st.button(name, key=f"example {name}", on_click=_example, args=(values,))


def _example(values: Mapping[str, Any]) -> None:
    given = dict(values)
    way = given.pop("way")
    widgets.take(Scenario({"layout": "auto", **preset_values(way, given["model"]), **given}))


def _sentence(asked: Scenario, task: str) -> None:
    """Fine-tune [model] with [way] at [tokens] on [count] x [GPU]."""
    subject = fields_of(Subject)
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom", border=True, key="sentence"):
        widgets.ask(fields_of(Sentence)["task"], 124)
        widgets.ask(subject["model"], 214)
        _ask_way(asked, task)
        widgets.ask(_field("seq" if task == "Fine-tune" else "context", task), 142, slider=False)
        if task == "Serve":
            widgets.ask(_field("concurrency", task), 142, slider=False)
        elif asked.layout == "auto":
            widgets.ask(fields_of(Spread)["gpus"], 90, slider=False)
        widgets.ask(subject["gpu"], 222)


def _ask_way(asked: Scenario, task: str) -> None:
    command = "train" if task == "Fine-tune" else "serve"
    now = way_of(asked)
    options = ways_of(command)
    key = f"way{scenario.WIDGET}"
    st.session_state[key] = now
    st.selectbox(
        "With", options, key=key, on_change=_choose_way, args=(key,), width=210, placeholder="settings of your own",
        help="A way brings its companions: " + "; ".join(f"**{name}**: {WAYS[name].said}" for name in options),
    )  # fmt: skip


def _choose_way(key: str) -> None:
    if way := st.session_state[key]:
        widgets.put(preset_values(way, scenario.current().model))


def _matrix(asked: Scenario, task: str, numbers: Numbers) -> None:
    command: Literal["train", "serve"] = "train" if task == "Fine-tune" else "serve"
    known = gpus()
    mine = asked.subject.gpu
    devices = [known[name] for name in dict.fromkeys((*_DEVICES, *([mine] if mine != CUSTOM else [])))]
    ways = "ways" if command == "train" else "formats"
    charts.title("What fits which GPU: GiB on one, or how many GPUs it would take")
    rows = st.segmented_control(
        "Rows", [ways, "models"], default=ways, key=f"rows {task}", label_visibility="collapsed"
    )
    with complaints():
        if rows == "models":
            with st.spinner(
                "Working out every model …"
            ):  # seconds the first time, for each step is played through the allocator
                cells = [cell for spec, way in _models(asked, command) for cell in fit_matrix(spec, [way], devices)]
        else:
            cells = fit_matrix(asked.spec(), _ways(asked, command), devices)
        said = f"Matrix of {len(cells)} cells: {rows or ways} by GPUs"
        chosen = charts.matrix([_square(cell, numbers) for cell in cells], f"matrix {task} {rows}", said)
        st.caption(
            "Training on several GPUs is FSDP (ZeRO-3), serving tensor parallelism in one node. A click makes a cell the scenario."
        )
        if chosen and st.session_state.get("matrix taken") != chosen:
            st.session_state["matrix taken"] = chosen
            _take_cell(next(cell for cell in cells if (_square(cell, numbers).row, _heading(cell.gpu)) == chosen))
            st.rerun()


def _ways(asked: Scenario, command: Literal["train", "serve"]) -> Sequence[Way]:
    plan = COMMANDS[command].plan
    base = asked.of(plan).model_dump()
    for name in scenario.SPREAD:
        base.pop(name, None)
    experts = _has_experts(asked.model)
    return [Way(name, command, {**base, **settings_of(name, experts)}) for name in ways_of(command)]


def _models(asked: Scenario, command: Literal["train", "serve"]) -> Iterator[tuple[ModelSpec, Way]]:
    """The scenario's own way for each of a few models, the scenario's among them; the name of a way is the model's id."""
    plan, way = COMMANDS[command].plan, way_of(asked)
    mine = asked.subject.model
    for name in dict.fromkeys((*([mine] if mine in catalogue() else []), *_MODELS)):
        values = asked.of(plan).model_dump() | (settings_of(way, _has_experts(name)) if way else {})
        kept = {field: value for field, value in values.items() if field not in scenario.SPREAD}
        yield load(name), Way(name, command, kept)


def _heading(gpu: Gpu) -> str:
    """The GPU's name on two lines."""
    name = names.DEVICES[gpu.name].split(" ", 1)[1].removeprefix("GeForce ").removeprefix("Instinct ")
    head, _, memory = name.rpartition(" ")
    head, _, size = head.rpartition(" ")
    return f"{head}|{size} {memory}"


def _square(cell: Cell, numbers: Numbers) -> charts.Square:
    row, column = names.MODELS.get(cell.way.name, cell.way.name), _heading(cell.gpu)
    if cell.needed is None and cell.count is None:
        return charts.Square(row, column, "–", "unknown", cell.why)
    needed = numbers.show(cell.needed) if cell.needed is not None else "more than one GPU"
    if cell.fits and cell.needed and cell.limit:
        kind = "tight" if cell.needed > _TIGHT * cell.limit else "fits"
        return charts.Square(row, column, _short(needed), kind, f"needs {needed} of {numbers.show(cell.limit)}")
    if cell.count:
        return charts.Square(
            row, column, f"{cell.count:,} GPUs", "takes more GPUs", f"one needs {needed}; fits on {cell.count:,}"
        )
    return charts.Square(
        row, column, "no", "does not fit", f"needs {needed} on one; no number that was tried is enough"
    )


def _short(text: str) -> str:
    """`23.71 GiB` as a cell has room for it."""
    value, _, unit = text.partition(" ")
    return f"{float(value.replace(',', '')):.0f} {unit}"


def _take_cell(cell: Cell) -> None:
    of_model = cell.way.name in catalogue()
    chosen = {"model": cell.way.name} if of_model else preset_values(cell.way.name, scenario.current().model)
    if of_model and (way := way_of(scenario.current())):
        chosen |= preset_values(way, cell.way.name)
    values = {**chosen, "gpu": cell.gpu.name}
    if cell.way.command == "train":
        values |= {"layout": "auto", "gpus": cell.count or 1}
    else:
        values |= {fields_of(SERVE.plan)["tp"].key: cell.count or 1}
    widgets.take(scenario.current().changed(values), redraw=False)
