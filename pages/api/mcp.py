"""`plumbline mcp`: the questions as tools of the Model Context Protocol (https://modelcontextprotocol.io/specification), over stdio.

One JSON-RPC 2.0 message a line. A tool's arguments are the body that /api takes; its answer is the command line's JSON.
It never measures, opens no path and fetches nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import IO, Any, Final

from calc.commands import COMMANDS, Command
from calc.errors import InputError
from calc.version import VERSION
from pages.api import openapi, questions

VERSIONS: Final = ("2025-06-18", "2025-03-26", "2024-11-05")  # newest first
LARGEST: Final = 2**20  # characters of a message
_PARSE, _REQUEST, _METHOD, _PARAMETERS = -32700, -32600, -32601, -32602  # JSON-RPC 2.0, section 5.1


class Refused(Exception):
    """A request that cannot be answered: its JSON-RPC code and why."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


def main() -> int:
    """Answer until standard input ends."""
    serve(sys.stdin, sys.stdout)
    return 0


def serve(source: IO[str], target: IO[str]) -> None:
    """Answer each line of `source` on `target`."""
    while line := source.readline(LARGEST + 1):
        answer = _too_long(source, line) if len(line) > LARGEST else answered(line)
        if answer is not None:
            target.write(json.dumps(answer) + "\n")
            target.flush()


def _too_long(source: IO[str], line: str) -> dict[str, Any]:
    while line and not line.endswith("\n"):
        line = source.readline(LARGEST)
    return _error(None, _REQUEST, f"a message may have {LARGEST:,} characters")


def answered(line: str) -> dict[str, Any] | None:
    """The answer to one message; None to a notification."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return _error(None, _PARSE, "the line is not JSON")
    if not isinstance(message, dict) or not isinstance(message.get("method"), str):
        return _error(None, _REQUEST, "the line is no JSON-RPC request")
    if "id" not in message:
        return None
    given = message.get("params") or {}
    try:
        if not isinstance(given, dict):
            raise Refused(_PARAMETERS, "params must be an object")
        if message["method"] not in _METHODS:
            raise Refused(_METHOD, f"{message['method']} is not one of {', '.join(_METHODS)}")
        return {"jsonrpc": "2.0", "id": message["id"], "result": _METHODS[message["method"]](given)}
    except Refused as error:
        return _error(message["id"], error.code, str(error))


def _error(number: object, code: int, why: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": why}}


def _initialize(given: Mapping[str, Any]) -> dict[str, Any]:
    asked = given.get("protocolVersion")
    return {
        "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": {"name": "plumbline", "version": VERSION},
        "instructions": "Memory, speed and cost of training and serving language models, each with its formula and source. "
        "models and gpus list the names that the other tools take.",
    }


def _listed(_: Mapping[str, Any]) -> dict[str, Any]:
    return {"tools": tools()}


@cache
def tools() -> list[dict[str, Any]]:
    """Every question with the JSON schema of its arguments."""
    found = [_tool(command) for command in COMMANDS.values()]
    search = {"type": "object", "properties": {"search": {"type": "string"}}, "additionalProperties": False}
    found += [
        {"name": name, "description": f"the catalogue of {name}, each with its source", "inputSchema": search}
        for name in questions.LISTS
    ]
    return found


def _tool(command: Command) -> dict[str, Any]:
    plan = command.plan.model_json_schema()
    schema: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": {}}
    if definitions := plan.pop("$defs", None):
        schema["$defs"] = definitions
    described = openapi.description()["components"]["schemas"]
    if command.takes_model:
        schema["properties"]["model"] = described["Model"]
        schema["required"] = ["model"]
    schema["properties"]["plan"] = plan
    if command.takes_gpu:
        schema["properties"]["gpu"] = described["Gpu"]
    return {"name": command.name, "description": command.help, "inputSchema": schema}


def _called(given: Mapping[str, Any]) -> dict[str, Any]:
    name, arguments = given.get("name"), given.get("arguments") or {}
    if name not in questions.NAMES:
        raise Refused(_PARAMETERS, f"there is no tool {name!r}; there are {', '.join(questions.NAMES)}")
    if not isinstance(arguments, dict):
        raise Refused(_PARAMETERS, "arguments must be an object")
    try:
        if name in questions.LISTS:
            text = questions.by_parameters(name, {key: [str(value)] for key, value in arguments.items()})
        else:
            text = questions.by_body(name, arguments)
    except InputError as error:
        return {"content": [{"type": "text", "text": str(error)}], "isError": True}
    return {"content": [{"type": "text", "text": text}], "isError": False}


_METHODS: Final[Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "initialize": _initialize,
    "ping": lambda given: {},
    "tools/list": _listed,
    "tools/call": _called,
}

if __name__ == "__main__":
    raise SystemExit(main())
