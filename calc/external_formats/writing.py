"""What writing a plan for another tool needs: which fields were said there, and which could not be."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from calc.catalogue import catalogue
from calc.commands import flag, is_switch, word
from calc.errors import InputError
from calc.external_formats.draft import Bad
from calc.external_formats.draft import text as text_of


@dataclass(slots=True)
class Writing:
    """A plan on its way into a tool's own form. `notes` names the fields that the tool has no setting for."""

    tool: str
    model: str
    plan: Any
    said: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @property
    def hub_id(self) -> str:
        """The model as the tool finds it: a catalogue's name as its Hugging Face id."""
        entry = catalogue().get(self.model)
        try:
            return text_of(entry.hub_id if entry else self.model)
        except Bad as bad:
            raise InputError.of("MODEL", self.model, str(bad)) from None

    def say(self, name: str, default: Any) -> Any:
        """The value of a field, which counts as said from now on."""
        self.said.add(name)
        value = getattr(self.plan, name)
        return default if value is None else value

    def only(self, name: str, *allowed: str) -> None:
        """InputError unless the field has one of the values that the tool can run."""
        value = self.say(name, None)
        if value not in allowed:
            raise InputError.of(flag(name), value, f"{self.tool} runs {' or '.join(allowed)}")

    def unsaid(self, name: str, reason: str) -> list[str]:
        """Note that a field's value cannot be said there."""
        self.notes.append(f"{flag(name)} {word(getattr(self.plan, name))} cannot be said to {self.tool}: {reason}")
        return []


def flags(writing: Writing, names: Mapping[str, str]) -> list[str]:
    """Each field that is not at its default as its flag; a switch without a value, off as `--no-...`."""
    words = []
    for name, option in names.items():
        info = type(writing.plan).model_fields[name]
        value = writing.say(name, None)
        if value == info.get_default(call_default_factory=True):
            continue
        if is_switch(info):
            words.append(option if value else "--no-" + option[2:])
        else:
            words += [option, word(value)]
    return words


def note_rest(writing: Writing) -> None:
    """Note every field that differs from its default and was not said."""
    plan: BaseModel = writing.plan
    for name, info in type(plan).model_fields.items():
        value = getattr(plan, name)
        if name not in writing.said and value != info.get_default(call_default_factory=True):
            writing.unsaid(name, "it has no setting for it")


def left_over(writing: Writing, words: list[str]) -> str:
    """The command, after noting what it does not say."""
    note_rest(writing)
    return shlex.join(words)
