"""The page's address: read into the scenario before the first widget, written from it after the last.

A link holds a version, the model, the GPU and every value that is not its version's start value, so that a later default
does not change an old link; a config.json of the user's own, compressed; and the pins. Links without a version are those of
the first app: they keep its start values, and its second scenario becomes a pin.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import streamlit as st
from pydantic import BaseModel

from calc.errors import InputError, show
from pages.ui import pins
from pages.ui.fields import Field, fields_of
from pages.ui.scenario import SHARED, SPREAD, Scenario, current, forget_widgets, keep, start
from pages.ui.text import plain

VERSION: Final = "2"
_SECOND: Final = "b_"  # how the first app wrote its second scenario
_FIRST_START: Final = {  # what links without a version leave out
    "model": "llama-2-7b",
    "gpu": "h100-sxm-80gb",
    "recipe": "pure-bf16",
    "recompute": "none",
    "optimizer_kernel": "foreach",
    "tokens": None,
    "output": None,
}
_WRITTEN, _TOUCHED, _PLANS = "address written", "widget changed", "plans of the page"
_MOST_CONFIG: Final = 2000  # characters of a compressed config in a link
_MOST_TEXT: Final = 2**20  # bytes that it may unpack to
_OLD_SENTINELS: Final = "0"  # how the first app wrote "none" and "auto" in fields that may be left out

Plans = tuple[type[BaseModel], ...]


def touched() -> None:
    """A widget's callback says that the scenario, not the address, has the newest values of this run."""
    st.session_state[_TOUCHED] = True


def follow(plans: Plans, everywhere: Iterable[Plans]) -> None:
    """Take over what the address asks for, where a person changed it; say what of it cannot be."""
    st.session_state[_PLANS] = plans
    newer = st.session_state.pop(_TOUCHED, False)
    given = {name: st.query_params.get_all(name) for name in st.query_params}
    if not given or newer or _joined(given) == st.session_state.get(_WRITTEN):
        return
    found = read(given, [*plans, *(plan for each in everywhere for plan in each)])
    keep(found.scenario)
    pins.keep(found.pins)
    forget_widgets()
    if found.complaints:
        st.error("The link asks for what cannot be; its other values are kept.\n\n" + _bullets(found.complaints))


def write() -> None:
    """Show the scenario in the address."""
    wanted = parameters(current(), st.session_state[_PLANS], pins.kept())
    if _joined(wanted) != _joined({name: st.query_params.get_all(name) for name in st.query_params}):
        st.query_params.from_dict(wanted)
    st.session_state[_WRITTEN] = _joined(wanted)


def address() -> str:
    """The whole address of the page with its scenario."""
    place = urlsplit(st.context.url or "")
    query = urlencode(parameters(current(), st.session_state[_PLANS], pins.kept()), doseq=True)
    return urlunsplit((place.scheme, place.netloc, place.path, query, ""))


def config_fits(scenario: Scenario) -> bool:
    """Whether the scenario's own config.json is short enough for a link; True where it has none."""
    return not scenario.config or len(_packed(scenario.config)) <= _MOST_CONFIG


def parameters(scenario: Scenario, plans: Plans, pinned: Sequence[Scenario] = ()) -> dict[str, list[str]]:
    """The parameters of the link of a scenario and its pins, on a page of these plans."""
    found = {"v": [VERSION], "model": [scenario.subject.model], "gpu": [scenario.subject.gpu]}
    for plan in (*SHARED, *plans):
        for name, field in fields_of(plan).items():
            value = scenario.value(field)
            if value != start(field) and not (scenario.layout == "auto" and name in SPREAD):
                found[name] = [field.write(value)]
    if scenario.config and config_fits(scenario):
        found["config"] = [_packed(scenario.config)]
    if pinned:
        found["pin"] = [pins.written(pin) for pin in pinned]
    return found


class Read(NamedTuple):
    """What a link says; complaints name what could not be read."""

    scenario: Scenario
    pins: list[Scenario]
    complaints: list[str]


def read(given: Mapping[str, Sequence[str]], plans: Sequence[type[BaseModel]]) -> Read:
    """The scenario and the pins of a link's parameters, on a page whose plans come first."""
    texts = {name: values[-1] for name, values in given.items() if name not in ("pin", "v", "config")}
    old = "v" not in given
    complaints: list[str] = []
    values = _values({name: text for name, text in texts.items() if not _is_second(name)}, plans, complaints, old)
    first = _first_start(values, plans) if old else values
    config = _config(given, complaints)
    kept = [pin for text in given.get("pin", ()) if (pin := _pin(text, complaints))]
    if old and texts.get("compare") == "true":
        second = {name.removeprefix(_SECOND): text for name, text in texts.items() if name.startswith(_SECOND)}
        kept.append(Scenario(_first_start(_values(second, plans, complaints, old), plans)))
    return Read(Scenario(first | config), kept, complaints)


def _is_second(name: str) -> bool:
    return name == "compare" or name.startswith(_SECOND)


def _first_start(values: Mapping[str, Any], plans: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """An old link's values with what it left out; its degrees of parallelism are a layout by hand."""
    found = {**_FIRST_START, **values}
    return found | ({"layout": "by hand"} if set(values) & set(SPREAD) else {})


def _values(
    texts: Mapping[str, str], plans: Sequence[type[BaseModel]], complaints: list[str], old: bool
) -> dict[str, Any]:
    fields: dict[str, Field] = {}
    for plan in (*SHARED, *plans):
        for name, field in fields_of(plan).items():
            fields.setdefault(name, field)
            fields.setdefault(field.key, field)
    values = {}
    for name, text in texts.items():
        if name not in fields:
            complaints.append(_unknown(name, text, fields))
            continue
        field = fields[name]
        if not (old and text == _OLD_SENTINELS and field.default is None):
            try:
                values[field.key] = field.read(text)
            except InputError as error:
                complaints.append(str(error))
    return values


def _unknown(name: str, text: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=2, cutoff=0.6)
    hint = f"; close ones are {' and '.join(close)}" if close else ""
    return f"{name}: unknown parameter (its value is {show(text)}){hint}"


def _pin(text: str, complaints: list[str]) -> Scenario | None:
    """A pin of a link; a bad one does not spoil the others."""
    found: list[str] = []
    values = _values(dict(parse_qsl(text, keep_blank_values=True, max_num_fields=200)), pins.plans(), found, old=False)
    complaints += [f"pin: {each}" for each in found]
    return Scenario(values) if values else None


def _packed(config: str) -> str:
    return base64.urlsafe_b64encode(zlib.compress(config.encode(), 9)).decode().rstrip("=")


def _config(given: Mapping[str, Sequence[str]], complaints: list[str]) -> dict[str, str]:
    text = (given.get("config") or [""])[-1]
    if not text:
        return {}
    try:
        packed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        stream = zlib.decompressobj()
        unpacked = stream.decompress(packed, _MOST_TEXT).decode()
        if stream.eof:
            return {"config": unpacked}
    except (binascii.Error, zlib.error, ValueError):
        pass
    complaints.append("config: it is not a config.json as a link of this app holds it; paste the file again")
    return {}


def _joined(parameters: Mapping[str, Sequence[str]]) -> str:
    return urlencode({name: list(values) for name, values in sorted(parameters.items())}, doseq=True)


def _bullets(lines: list[str]) -> str:
    """A Markdown list whose lines show as typed: what came in with a link is never read as Markdown."""
    return "\n".join(f"- {plain(line)}" for line in lines)
