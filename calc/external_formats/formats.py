"""Which tool a text is of, reading it into a scenario, and writing one for a tool."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from calc.commands import COMMANDS, command_line, flag
from calc.errors import InputError, validated
from calc.external_formats.detection import command_of, tool_of
from calc.external_formats.documents import flattened, parse
from calc.external_formats.draft import Draft, Table, take
from calc.external_formats.launchers import read_command
from calc.external_formats.models import resolve
from calc.external_formats.writing import Writing


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool: the module that has its SETTINGS, `finish` and perhaps `write`, and the question that its runs are."""

    module: str
    command: str
    writes: bool = False


TOOLS: Final[Mapping[str, Tool]] = {
    "vllm": Tool("vllm", "serve", writes=True),
    "sglang": Tool("sglang", "serve"),
    "llama-server": Tool("llama_server", "serve", writes=True),
    "deepspeed": Tool("deepspeed", "train", writes=True),
    "trl": Tool("trl", "train", writes=True),
    "axolotl": Tool("axolotl", "train"),
    "llama-factory": Tool("llama_factory", "train"),
    "torchtitan": Tool("torchtitan", "train", writes=True),
    "megatron": Tool("megatron", "train", writes=True),
    "accelerate": Tool("accelerate", "train"),
}
WRITTEN: Final = tuple(name for name, tool in TOOLS.items() if tool.writes)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run as a question of this product."""

    tool: str
    command: str
    model: str
    plan: BaseModel
    understood: tuple[str, ...]
    not_understood: tuple[str, ...]
    assumed: tuple[str, ...]
    model_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def given(self) -> dict[str, Any]:
        """The plan's fields that the text gives a value."""
        data: dict[str, Any] = self.plan.model_dump(mode="json")
        return {name: data[name] for name in type(self.plan).model_fields if name in self.plan.model_fields_set}

    def command_line(self) -> str:
        """The equal command."""
        return command_line(COMMANDS[self.command], self.plan, self.model or "MODEL")

    def as_json(self) -> dict[str, Any]:
        made = {
            "tool": self.tool,
            "command": self.command,
            "model": self.model or None,
            "plan": self.given,
            "understood": list(self.understood),
            "not_understood": list(self.not_understood),
            "assumed": list(self.assumed),
            "command_line": self.command_line(),
        }
        return made | ({"model_config": dict(self.model_config)} if self.model_config else {})


def read(text: str, tool: str | None = None, gpus: int | None = None, folder: Path | None = None) -> Scenario:
    """The scenario of a command line or of a config file's text.

    `tool` is a name of TOOLS, None to find it out; `gpus` says how many GPUs where the text does not. Files that the run names are
    opened where they lie in `folder` under a plain name; without one they are named alone. InputError when the text is of
    no known tool, is none of that tool, or describes what the rules of a plan refuse.
    """
    if tool is not None and tool not in TOOLS:
        raise InputError.of("--as", tool, f"it must be one of {', '.join(TOOLS)}")
    if not text.strip():
        raise InputError("text: it is empty; give a command line or a config file", "text")
    line = None if text.lstrip()[:1] in ("{", "[") else command_of(text, tool)
    if line:
        name, words, variables = line
        draft = _draft(name, gpus, folder)
        read_command(draft, _module(name), words, variables)
        if re.search(r"(?m)^[ \t]*(if|case|for|while)\b", text):
            draft.assumed.append("conditions and loops of the script are not evaluated: every branch is read")
    else:
        kind, data = parse(text)
        draft = _draft(tool or tool_of(kind, data, TOOLS), gpus, folder)
        take(draft, _module(draft.tool).SETTINGS, flattened(data, whole=frozenset({"deepspeed"})))
        if not draft.understood:
            raise InputError(f"text: nothing in it is a setting of {draft.tool}", "text")
    return _finished(draft)


def _draft(name: str, gpus: int | None, folder: Path | None) -> Draft:
    draft = Draft(name, TOOLS[name].command, folder=folder)
    if gpus is not None:
        draft.facts["gpus"] = gpus
    return draft


def settings_of(name: str) -> Table:
    """What a tool's config file may hold."""
    table: Table = _module(name).SETTINGS
    return table


def _module(name: str) -> Any:
    return import_module(f"calc.external_formats.{TOOLS[name].module}")


def _finished(draft: Draft) -> Scenario:
    module = _module(draft.tool)
    module.finish(draft)
    resolve(draft)
    draft.assumed.append("GPU: the text names none; --gpu says it to the command")
    plan = validated(COMMANDS[draft.command].plan, draft.plan, flag)
    return Scenario(
        draft.tool,
        draft.command,
        draft.model,
        plan,
        tuple(draft.understood),
        tuple(draft.not_understood),
        tuple(draft.assumed),
        draft.facts.get("model_config", {}),
    )


def write(name: str, model: str, plan: BaseModel) -> tuple[str, tuple[str, ...]]:
    """The plan in a tool's own form, and notes on what cannot be said there. InputError for a plan that the tool cannot run."""
    if name not in WRITTEN:
        raise InputError.of("FORMAT", name, f"it must be one of {', '.join(WRITTEN)}")
    writing = Writing(name, model, plan)
    made: str = _module(name).write(writing)
    return made, tuple(writing.notes)
