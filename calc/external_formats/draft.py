"""What is read of another tool's run: the plan so far, and what was understood, not understood and assumed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from calc.commands import word
from calc.errors import InputError, show

_MOST_SHOWN: Final = 160  # characters of a setting in a list


class NotSaid(Exception):
    """A setting that no field of the plan says; its text is the reason."""


@dataclass(slots=True)
class Draft:
    """A run while it is read. `facts` are settings that only together give a field: the ranks, the steps of accumulation.

    `asked` holds what the caller states besides the text (`gpus`).
    """

    tool: str
    command: str
    model: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    understood: list[str] = field(default_factory=list)
    not_understood: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    folder: Path | None = None  # of the run, whose files may be opened; None: none is
    opened: list[str] = field(default_factory=list)

    def assume(self, name: str, value: object, reason: str) -> None:
        """Give a field a value that the text leaves open, unless it has one."""
        if name not in self.plan:
            self.plan[name] = value
            self.assumed.append(f"{name} {word(value)}: {reason}")

    def whole(self, name: str, default: int = 1) -> int:
        """A fact that is a number, or the default."""
        return int(self.facts.get(name, default))


Apply = Callable[[Draft, Any], str]


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a tool. `apply` puts its value into a draft and says what it became ("" : nothing here)."""

    apply: Apply
    is_switch: bool = False


Table = Mapping[str, Setting]
NO_EFFECT: Final = "no effect here"


def sets(name: str, read: Callable[[Any], Any] | None = None) -> Setting:
    """The setting is a field of the plan."""
    convert = read or whole

    def apply(draft: Draft, value: Any) -> str:
        draft.plan[name] = convert(value)
        return f"{name} {word(draft.plan[name])}"

    return Setting(apply)


def states(name: str, read: Callable[[Any], Any] | None = None, is_switch: bool = False) -> Setting:
    """The setting is kept as a fact, from which the tool's `finish` makes fields."""
    convert = read or whole

    def apply(draft: Draft, value: Any) -> str:
        draft.facts[name] = convert(value)
        return f"{name.replace('_', ' ')} {word(draft.facts[name])}"

    return Setting(apply, is_switch)


def switches(name: str, on: object = True, off: object = None) -> Setting:
    """A switch that gives a field the value `on`, or `off` where it is false (None: the field stays)."""

    def apply(draft: Draft, value: Any) -> str:
        chosen = on if truth(value) else off
        if chosen is None:
            return NO_EFFECT
        draft.plan[name] = chosen
        return f"{name} {word(chosen)}"

    return Setting(apply, is_switch=True)


def is_model() -> Setting:
    """The setting names the model."""

    def apply(draft: Draft, value: Any) -> str:
        draft.model = text(value)
        return f"model {draft.model}"

    return Setting(apply)


def refuses(reason: str, is_switch: bool = False, unless: Callable[[Any], bool] | None = None) -> Setting:
    """The setting is known and is not modelled; `unless` tells the values that change nothing."""

    def apply(draft: Draft, value: Any) -> str:
        if unless and unless(value):
            return NO_EFFECT
        raise NotSaid(reason)

    return Setting(apply, is_switch)


def adapters(slots: int) -> Setting:
    """The switch that turns LoRA on, with so many slots unless another setting says how many."""

    def apply(draft: Draft, value: Any) -> str:
        if truth(value):
            draft.plan.setdefault("lora_slots", slots)
        return f"lora_slots {draft.plan['lora_slots']}" if "lora_slots" in draft.plan else NO_EFFECT

    return Setting(apply, is_switch=True)


def ignores(names: str, is_switch: bool = False) -> dict[str, Setting]:
    """Settings, with spaces between them, that change neither memory nor time here."""
    setting = Setting(lambda draft, value: NO_EFFECT, is_switch)
    return dict.fromkeys(names.split(), setting)


def named(names: str, setting: Setting) -> dict[str, Setting]:
    """One setting under several names, with spaces between them."""
    return dict.fromkeys(names.split(), setting)


def take(draft: Draft, table: Table, pairs: Iterable[tuple[str, str, Any]]) -> None:
    """Apply each (name as written, key, value). What the table does not know is named, never dropped."""
    for shown, key, value in pairs:
        said = f"{shown} {_short(value)}".rstrip()
        setting = table.get(key)
        if setting is None:
            draft.not_understood.append(f"{said}: not a setting known here")
        elif value is None:
            draft.understood.append(f"{said}: left empty")
        elif isinstance(value, str) and "$" in value:
            draft.not_understood.append(f"{said}: a shell variable without a value here")
        else:
            _apply(draft, setting, shown, said, value)


def _apply(draft: Draft, setting: Setting, shown: str, said: str, value: Any) -> None:
    try:
        became = setting.apply(draft, value)
    except NotSaid as reason:
        draft.not_understood.append(f"{said}: {reason}")
    except Bad as bad:
        raise InputError.of(shown[:60], value, str(bad)) from None
    else:
        draft.understood.append(f"{said}: {became}")


def _short(value: Any) -> str:
    if value is True or value is None:
        return "true" if value else ""
    shown = word(value) if isinstance(value, str | int | float) else show(value)
    shown = " ".join(shown.split())
    return shown if len(shown) <= _MOST_SHOWN else shown[: _MOST_SHOWN - 1] + "…"


class Bad(Exception):
    """A value of the wrong type; its text says what is allowed."""


def whole(value: Any) -> int:
    """A whole number as tools write it: 8, "8", 5e8, "1e9", "1_000", "8k"."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        number = float(value.replace("_", "")) if isinstance(value, str) else value
        if number != int(number) or abs(number) > 2**60:
            raise ValueError
        return int(number)
    except (ValueError, OverflowError):
        raise Bad("it must be a whole number") from None


def scaled(value: Any) -> int:
    """A whole number that may end in k, m, g (thousands) or K, M, G (binary), as vLLM and llama.cpp read them."""
    ends = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    if isinstance(value, str) and value[-1:] in ends:
        try:
            return int(float(value[:-1]) * ends[value[-1]])
        except (ValueError, OverflowError):
            raise Bad("it must be a whole number, as 8192 or 8k") from None
    return whole(value)


def number(value: Any) -> float:
    """A finite number."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        found = float(value)
    except (ValueError, OverflowError):
        raise Bad("it must be a number") from None
    if not abs(found) < 1e300:
        raise Bad("it must be a finite number")
    return found


def truth(value: Any) -> bool:
    """True or false as flags and YAML write it."""
    if isinstance(value, bool):
        return value
    known = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if str(value).lower() not in known:
        raise Bad("it must be true or false")
    return known[str(value).lower()]


def text(value: Any) -> str:
    """A text of one line."""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise Bad("it must be a text")
    found = str(value).strip()
    if not found or len(found) > 300 or not found.isprintable():
        raise Bad("it must be a text of one line and at most 300 characters")
    return found


def names(value: Any) -> tuple[str, ...]:
    """Several names: a list, or a text with commas or spaces."""
    parts = value if isinstance(value, list) else text(value).replace(",", " ").split()
    return tuple(text(part) for part in parts)


def one_of(known: Mapping[str, Any], otherwise: str) -> Callable[[Any], Any]:
    """One of the tool's words as a value of the plan; another word is not said, with the reason."""

    def read(value: Any) -> Any:
        given = str(value).lower() if isinstance(value, bool) else text(value)
        if given in known:
            return known[given]
        if given.lower() in known:
            return known[given.lower()]
        raise NotSaid(otherwise)

    return read
