"""The OpenAPI description of /api, made from the questions' own plans, and the same as a page to read."""

from __future__ import annotations

from functools import cache
from html import escape
from typing import Any, Final

from calc.commands import COMMANDS, Command
from calc.version import VERSION
from pages.api.questions import GPU_FIELDS, LISTS

PROBLEM: Final = "application/problem+json"
_MODEL, _DEVICE = "meta-llama-3.1-8b", "h100-sxm-80gb"
# a few values that make an example of each question
_EXAMPLES: Final[dict[str, dict[str, Any]]] = {
    "train": {"method": "lora", "seq": 4096},
    "serve": {"context": 32768, "engine": "vllm"},
    "simulate": {"engine": "vllm"},
    "compute": {"tokens": 10**12, "gpus": 256},
    "time": {"dp": 8, "zero": 3},
    "communication": {"dp": 8, "zero": 3},
    "plan": {"gpus": 64},
    "plan-serving": {"gpus": 8},
    "pipeline": {"schedule": "1f1b", "stages": 4, "microbatches": 8},
    "scaling": {"flops": 576 * 10**21},
}
_PROBLEM_SCHEMA: Final = {
    "type": "object",
    "required": ["title", "status", "detail", "field", "value", "allowed"],
    "properties": {
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "one line: the field, the value, what is allowed"},
        "field": {"type": "string", "description": "what was wrong; empty where no single field is"},
        "value": {"description": "what was given, as text"},
        "allowed": {"type": "string", "description": "what it may be"},
    },
}


@cache
def description() -> dict[str, Any]:
    """The description, OpenAPI 3.1."""
    schemas: dict[str, Any] = {"Problem": _PROBLEM_SCHEMA, "Gpu": _gpu_schema(), "Model": _model_schema()}
    paths: dict[str, Any] = {}
    for command in COMMANDS.values():
        schema = command.plan.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[command.plan_name] = schema
        paths[f"/api/{command.name}"] = {"get": _get(command, schema), "post": _post(command)}
    for name in LISTS:
        paths[f"/api/{name}"] = {"get": _list(name)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Plumbline",
            "version": VERSION,
            "description": "The answers of Plumbline's command line as JSON: the same bytes as `python -m calc NAME --format json`.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": schemas},
    }


def example(command: Command) -> dict[str, Any]:
    """A body that the question answers."""
    body: dict[str, Any] = {"model": _MODEL} if command.takes_model else {}
    body["plan"] = _EXAMPLES.get(command.name, {})
    return body | ({"gpu": _DEVICE} if command.takes_gpu else {})


def _gpu_schema() -> dict[str, Any]:
    figures = {name: {"type": "number", "exclusiveMinimum": 0} for name in GPU_FIELDS[1:]}
    named = {"type": "string", "description": "a name of /api/gpus"}
    return {
        "oneOf": [
            named,
            {"type": "object", "additionalProperties": False, "properties": {"gpu": named, **figures}},
        ]
    }


def _model_schema() -> dict[str, Any]:
    return {
        "oneOf": [
            {"type": "string", "description": "a name of /api/models"},
            {"type": "object", "description": "a config.json"},
        ]
    }


_OBJECT: Final = {"type": "object"}


def _answers(said: str, schema: dict[str, Any] = _OBJECT) -> dict[str, Any]:
    problem = {"content": {PROBLEM: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
    return {
        "200": {"description": said, "content": {"application/json": {"schema": schema}}},
        "422": {"description": "a value that is not allowed", **problem},
        "400": {"description": "a body that is no JSON", **problem},
        "413": {"description": "a body over 1 MB", **problem},
        "405": {"description": "another method", **problem},
    }


def _get(command: Command, schema: dict[str, Any]) -> dict[str, Any]:
    parameters = [
        {
            "name": name,
            "in": "query",
            "required": False,
            "schema": {key: value for key, value in field.items() if key not in ("title", "description")},
            "description": field.get("description", ""),
        }
        for name, field in schema["properties"].items()
    ]
    subject = (["model"] if command.takes_model else []) + (list(GPU_FIELDS) if command.takes_gpu else [])
    kinds = {"model": "string", "gpu": "string"}
    parameters = [
        {
            "name": name,
            "in": "query",
            "required": name == "model",
            "schema": {"type": kinds.get(name, "number")},
            "description": "a name of /api/models" if name == "model" else "as the command line's flag",
        }
        for name in subject
    ] + parameters
    return {
        "operationId": f"get_{command.name.replace('-', '_')}",
        "summary": command.help,
        "description": "Parameters as in a page's link; what is left out has the command line's default.",
        "parameters": parameters,
        "responses": _answers("the answer"),
    }


def _post(command: Command) -> dict[str, Any]:
    properties: dict[str, Any] = {"plan": {"$ref": f"#/components/schemas/{command.plan_name}"}}
    if command.takes_model:
        properties["model"] = {"$ref": "#/components/schemas/Model"}
    if command.takes_gpu:
        properties["gpu"] = {"$ref": "#/components/schemas/Gpu"}
    body = {"type": "object", "additionalProperties": False, "properties": properties}
    if command.takes_model:
        body["required"] = ["model"]
    return {
        "operationId": command.name.replace("-", "_"),
        "summary": command.help,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": body, "example": example(command)}},
        },
        "responses": _answers("the answer"),
    }


def _list(name: str) -> dict[str, Any]:
    search = {"name": "search", "in": "query", "required": False, "schema": {"type": "string"}}
    return {
        "operationId": name,
        "summary": f"the catalogue of {name}, each with its source",
        "parameters": [search],
        "responses": _answers("the list", {"type": "array", "items": _OBJECT}),
    }


def page() -> str:
    """The description as one page of HTML without scripts."""
    import json

    rows = []
    for command in COMMANDS.values():
        fields = "".join(
            f"<tr><td><code>{escape(name)}</code></td><td>{escape(info.description or '')}</td></tr>"
            for name, info in command.plan.model_fields.items()
        )
        body = escape(json.dumps(example(command)))
        rows.append(
            f"<section><h2>/api/{command.name}</h2><p>{escape(command.help)}</p>"
            f"<pre>curl -s http://localhost:8501/api/{command.name} -d '{body}'</pre>"
            f"<details><summary>Fields of the plan</summary><table>{fields}</table></details></section>"
        )
    lists = "".join(f"<li><a href='/api/{name}'>/api/{name}</a></li>" for name in LISTS)
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        "<title>Plumbline: JSON over HTTP</title><style>:root{color-scheme:light dark}"
        "body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "pre{overflow-x:auto;padding:.6rem;border:1px solid #8886;border-radius:.4rem}"
        "td{vertical-align:top;padding:.2rem .8rem .2rem 0}</style><h1>JSON over HTTP</h1>"
        "<p>Each address gives the bytes of <code>python -m calc NAME --format json</code>. GET takes the parameters of a page's link, "
        "POST a body with <code>model</code>, <code>plan</code> and <code>gpu</code>. Bad input is answered with 422 and "
        "<code>field</code>, <code>value</code>, <code>allowed</code>. "
        f"<a href='/api/openapi.json'>OpenAPI description</a>.</p><ul>{lists}</ul>{''.join(rows)}</html>"
    )
