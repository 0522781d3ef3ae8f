"""The one error that bad input raises, everywhere: it names the field, the value given and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

_SHOWN = 60  # characters of a bad value that a message repeats; the rest is cut

Model = TypeVar("Model", bound=BaseModel)


def show(value: object) -> str:
    """The value as a message shows it: its repr on one line, cut at 60 characters."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


class InputError(ValueError):
    """Bad input from a user. `str(error)` is one line a user can act on.

    `field` is the name of what was wrong (a config key, a flag, a URL parameter), or "" when no single field is; `value` what was
    given, as `show` has it, and `allowed` the rule, "" where the message alone states them.
    """

    def __init__(self, message: str, field: str = "", value: str = "", allowed: str = "") -> None:
        super().__init__(" ".join(message.split()))
        self.field, self.value, self.allowed = field, value, allowed

    @classmethod
    def of(cls, field: str, value: object, allowed: str) -> InputError:
        """The usual form: `hidden_size: -3 is not allowed; it must be a whole number from 1 to 1048576`."""
        return cls(f"{field}: {show(value)} is not allowed; {allowed}", field, show(value), allowed)


def validated(model: type[Model], values: Mapping[str, Any], rename: Callable[[str], str] = lambda name: name) -> Model:
    """`model(**values)`, with pydantic's first complaint turned into one InputError.

    `rename` turns a field's name into what the user typed (a flag or a URL parameter).
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if not path:  # a cross-field rule: its message already states the rule and both values
            raise InputError(message) from None
        if first["type"] == "extra_forbidden":
            known = ", ".join(sorted(model.model_fields))
            raise InputError(f"{rename(path)}: unknown field; the known ones are {known}", rename(path)) from None
        raise InputError.of(rename(path), first["input"], allowed(message)) from None


def allowed(message: str) -> str:
    """Pydantic's sentence as one of this product: "Input should be 'a', 'b' or 'c'" is "it must be one of a, b, c"."""
    message = (
        message.removeprefix("Value error, ").replace("Input should be", "it must be").partition(", unable to parse")[0]
    )
    message = message.replace("a valid integer", "a whole number").replace("a valid number", "a number")
    quoted = message.removeprefix("it must be ").replace(" or ", ", ").split(", ")
    if len(quoted) > 1 and all(word[:1] == word[-1:] == "'" for word in quoted):
        return f"it must be one of {', '.join(word[1:-1] for word in quoted)}"
    return message[0].lower() + message[1:]
