"""A question over HTTP: from a link's parameters or from a JSON body to the JSON that `python -m calc NAME --format json` prints.

It never measures, opens no path and fetches nothing: a model is a name of the catalogue or a config.json in the body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from calc import cli
from calc.catalogue import catalogue, load
from calc.command_line.tables import answer_json
from calc.commands import COMMANDS, Command
from calc.errors import InputError, validated
from calc.hardware import Gpu, chosen_gpu
from calc.model.config import from_config
from calc.model.spec import ModelSpec

LISTS: Final = ("models", "gpus")
NAMES: Final = (*COMMANDS, *LISTS)
GPU_FIELDS: Final = ("gpu", "gpu_memory_gib", "gpu_tflops", "gpu_GBps")
_BODY: Final = ("model", "plan", "gpu")


def by_parameters(name: str, given: Mapping[str, list[str]]) -> str:
    """The answer to the parameters of an address.

    With `v` they are a page's link and mean what the page shows; without, what is left out has the command line's default.
    InputError names the parameter, its value and what is allowed.
    """
    if name in LISTS:
        return _list(name, given)
    from pages.ui.fields import Field, fields_of  # Streamlit's side: a body does without

    def read(field: Field, text: str) -> Any:
        switched = {"true": True, "false": False} if field.is_switch else {}
        return switched[text] if text in switched else field.read(text)

    command = COMMANDS[name]
    if "v" in given:
        return _by_link(command, given)
    texts = {key: values[-1] for key, values in given.items()}
    model = texts.pop("model", None)
    gpu: dict[str, Any] = {key: texts.pop(key) for key in GPU_FIELDS if key in texts}
    fields = fields_of(command.plan)
    plan = {key: read(fields[key], text) if key in fields else text for key, text in texts.items()}
    return _answer(command, model, plan, gpu)


def by_body(name: str, body: object) -> str:
    """The answer to a JSON body: `{"model": ..., "plan": {...}, "gpu": ...}`. InputError as in `by_parameters`."""
    if name in LISTS:
        raise InputError(f"{name} takes no body; ask with GET", "body")
    if not isinstance(body, dict):
        raise InputError.of("body", body, "it must be an object with model, plan and gpu")
    for key in body:
        if key not in _BODY:
            raise InputError.of("body", key, f"its keys are {', '.join(_BODY)}")
    plan, gpu = body.get("plan", {}), body.get("gpu")
    if not isinstance(plan, dict):
        raise InputError.of("plan", plan, "it must be an object")
    if isinstance(gpu, str):
        gpu = {"gpu": gpu}
    if not (gpu is None or isinstance(gpu, dict)):
        raise InputError.of("gpu", gpu, f"it must be a name, or an object with {', '.join(GPU_FIELDS)}")
    return _answer(COMMANDS[name], body.get("model"), plan, gpu or {})


def _list(name: str, given: Mapping[str, list[str]]) -> str:
    for key in given:
        if key != "search":
            raise InputError.of(key, given[key][-1], "the one parameter is search")
    search = given["search"][-1] if "search" in given else ""
    return cli.run([name, f"--search={search}", "--format", "json"])


def _by_link(command: Command, given: Mapping[str, list[str]]) -> str:
    from pages.ui import link

    found = link.read(given, [command.plan])
    if found.complaints:
        raise InputError(found.complaints[0])
    plan = found.scenario.of(command.plan)
    spec = found.scenario.spec() if command.takes_model else None
    return answer_json(command.answer(plan, spec, found.scenario.gpu() if command.takes_gpu else None))


def _answer(command: Command, model: object, values: Mapping[str, Any], gpu: Mapping[str, Any]) -> str:
    plan = validated(command.plan, values)
    if not command.takes_gpu and gpu:
        raise InputError.of("gpu", next(iter(gpu.values())), f"{command.name} takes no GPU")
    if not command.takes_model and model is not None:
        raise InputError.of("model", model, f"{command.name} takes no model")
    if command.stored and isinstance(model, str):
        _known(model)
        return answer_json(command.answer_with_stored(plan, model))
    spec = _spec(model) if command.takes_model else None
    return answer_json(command.answer(plan, spec, _gpu(gpu) if command.takes_gpu else None))


def _spec(model: object) -> ModelSpec:
    if isinstance(model, dict):
        return from_config(model, "config")
    return load(_known(model))


def _known(model: object) -> str:
    if not isinstance(model, str) or model not in catalogue():
        raise InputError.of("model", model, "it must be a name of /api/models, or in a body a config.json's object")
    return model


def _gpu(given: Mapping[str, Any]) -> Gpu | None:
    for key in given:
        if key not in GPU_FIELDS:
            raise InputError.of("gpu", key, f"its keys are {', '.join(GPU_FIELDS)}")
    memory, flops, bandwidth = (_figure(key, given.get(key)) for key in GPU_FIELDS[1:])
    name = given.get("gpu")
    if not (name is None or isinstance(name, str)):
        raise InputError.of("gpu", name, "it must be a name of /api/gpus")
    return chosen_gpu(name, memory, flops, bandwidth)


def _figure(key: str, value: object) -> float | None:
    try:
        return None if value is None else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InputError.of(key, value, "it must be a number") from None
