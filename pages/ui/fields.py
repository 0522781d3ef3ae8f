"""A plan's fields as the pages use them: one name each, read from what people write, written as links carry them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from calc.commands import choices, is_switch
from calc.errors import InputError, allowed
from calc.quantities import ALLOWED, LENGTHS, read_number
from pages.ui.appearance import Appearance, appearance

Groups = Mapping[str, Sequence[str]]

SWITCH: Mapping[str, bool | None] = {"auto": None, "on": True, "off": False}
_LARGEST = 10**40  # no field takes more
_LETTERS = ((10**12, "T"), (10**9, "B"), (10**6, "M"))  # of round numbers, as people write them
_LIST = 12  # choices that a message names one by one


@dataclass(frozen=True, eq=False)
class Field:
    """One field of one plan. `key` is its name in the session; fields of several plans that mean the same share it."""

    plan: type[BaseModel]
    name: str
    key: str

    @property
    def info(self) -> FieldInfo:
        return self.plan.model_fields[self.name]

    @property
    def default(self) -> Any:
        return self.info.get_default(call_default_factory=True)

    @property
    def appearance(self) -> Appearance:
        return appearance(self.name)

    @cached_property
    def kinds(self) -> frozenset[Any]:
        annotation = self.info.annotation
        several = get_origin(annotation) in (UnionType, Union)
        return frozenset(get_args(annotation) if several else (annotation,))

    @property
    def optional(self) -> bool:
        """Whether the field may be left out."""
        return NoneType in self.kinds

    @property
    def is_switch(self) -> bool:
        return is_switch(self.info)

    @property
    def is_number(self) -> bool:
        return bool(self.kinds & {int, float}) and not self.choices

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that the field takes; () where it takes others too."""
        return tuple(str(each) for each in self.appearance.choices or choices(self.info))

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        kind: Any = self.info.annotation
        return TypeAdapter(Annotated[(kind, *self.info.metadata)] if self.info.metadata else kind)

    def read(self, text: str) -> Any:
        """The value that a text means. InputError names the field, the text and what is allowed."""
        text = text.strip()
        if not text and self.optional:
            return None
        if self.is_switch:
            return self._switch(text)
        if self.choices:
            return self._choice(text)
        return self.checked(self._number(text) if self.is_number else text, text)

    def checked(self, value: Any, given: object = None) -> Any:
        """The value as the field's type has it. InputError where the field does not take it."""
        try:
            return getattr(self.plan.model_validate({self.name: value}), self.name)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
        if not first["loc"]:  # rules across fields are for the page, where all fields are known
            return self._adapter.validate_python(value)
        raise InputError.of(self.name, value if given is None else given, allowed(first["msg"]))

    def _number(self, text: str) -> int | float:
        number = read_number(text, self.name, lengths=self.name in LENGTHS)
        if not abs(number) <= _LARGEST:
            raise InputError.of(self.name, text, ALLOWED)
        return int(number) if number == number.to_integral_value() else float(number)

    def _switch(self, text: str) -> bool | None:
        words = SWITCH if self.optional else {"true": True, "false": False}
        if text not in words:
            raise InputError.of(self.name, text, f"it must be one of {', '.join(words)}")
        return words[text]

    def _choice(self, text: str) -> str | None:
        if text == "auto" and self.optional:
            return None
        if text not in self.choices:
            raise InputError.of(self.name, text, _one_of(self.choices, text))
        return text

    def write(self, value: Any) -> str:
        """A value as a link and an input box hold it."""
        if self.is_switch:
            words = SWITCH if self.optional else {"true": True, "false": False}
            return next(word for word, meaning in words.items() if meaning is value)
        if value is None:
            return "auto" if self.choices else ""
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        return f"{value:.15g}" if isinstance(value, float) else str(value)

    def shown(self, value: Any) -> str:
        """A value as an input box shows it: a large round number with a letter, which the box reads back as the same."""
        if isinstance(value, int | float) and not isinstance(value, bool) and self.name not in LENGTHS:
            for power, letter in _LETTERS:
                if value >= power and round(value / power, 3) * power == value:
                    return f"{value / power:.10g}{letter}"
        return self.write(value)


def _one_of(options: Sequence[str], text: str) -> str:
    if len(options) <= _LIST:
        return f"it must be one of {', '.join(options)}"
    close = difflib.get_close_matches(text, options, n=3, cutoff=0.5)
    return f"it must be one of the {len(options)} names of the list{'; close ones are ' if close else ''}{', '.join(close)}"


@lru_cache(maxsize=64)
def fields_of(plan: type[BaseModel]) -> Mapping[str, Field]:
    """The fields of a plan by name. A name that an earlier plan uses with another meaning gets a key of its own."""
    return {name: Field(plan, name, _key(plan, name)) for name in plan.model_fields}


_owners: dict[str, tuple[type[BaseModel], tuple[str, str]]] = {}


def register(plans: Iterable[type[BaseModel]]) -> None:
    """Make the plans known, in the order in which their names are given out."""
    for plan in plans:
        for name, info in plan.model_fields.items():
            _owners.setdefault(name, (plan, _meaning(info)))


def _key(plan: type[BaseModel], name: str) -> str:
    register([plan])
    return name if _owners[name][1] == _meaning(plan.model_fields[name]) else f"{plan.__name__}.{name}"


def _meaning(info: FieldInfo) -> tuple[str, str]:
    """What two fields of one name must share for one value to serve both: type and default."""
    return str(info.annotation), repr(info.default)
