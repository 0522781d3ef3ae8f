"""A run as another tool has it, pasted: its scenario is taken over, and what was not understood is named."""

from __future__ import annotations

from typing import Any, Final

import streamlit as st

from calc.catalogue import catalogue
from calc.commands import COMMANDS
from calc.errors import InputError
from calc.external_formats.formats import Scenario, read
from calc.sources.hub import parse_id
from pages.ui import scenario
from pages.ui.appearance import HUB
from pages.ui.fields import fields_of
from pages.ui.text import plain
from pages.ui.widgets import put

_TEXT, _READ = "own run", "own run, read"
_NOTHING: Final = (": no effect here", ": left empty")


def ask_run() -> None:
    """A text area, folded, whose run becomes the scenario."""
    fold = st.expander("Bring your own run", key="own run fold", icon=":material/content_paste:", on_change="rerun")
    if not fold.open:
        return
    with fold:
        st.text_area(
            "A command line or a config file, pasted",
            key=_TEXT,
            height=120,
            placeholder="vllm serve Qwen/Qwen3-8B --tensor-parallel-size 2",
            help="Of vLLM, SGLang, llama-server, DeepSpeed, TRL, axolotl, LLaMA-Factory, torchtitan, Megatron-LM or accelerate. "
            "Nothing of it is run.",
        )
        st.button("Read it", on_click=_take, width="stretch")
        _show(st.session_state.get(_READ))


def _take() -> None:
    """A callback: the text's run becomes the scenario; a text that is none is said here."""
    try:
        found = read(str(st.session_state.get(_TEXT) or ""))
    except InputError as error:
        st.session_state[_READ] = str(error)
        return
    st.session_state[_READ] = found
    put(values_of(found))


def values_of(found: Scenario) -> dict[str, Any]:
    """The run's scenario by field key: every field of its plan, so that nothing of the scenario before is left in it."""
    fields = fields_of(COMMANDS[found.command].plan)
    values = {field.key: getattr(found.plan, name) for name, field in fields.items()}
    subject = fields_of(scenario.Subject)
    if found.model in catalogue():
        values[subject["model"].key] = found.model
    elif found.model and parse_id(found.model):
        values |= {subject["model"].key: HUB, subject["hub_id"].key: found.model}
    if found.command == "train":
        spread = fields_of(scenario.Spread)
        values |= {spread["gpus"].key: getattr(found.plan, "gpus", 1), spread["layout"].key: "by hand"}
    return values


def _show(found: Scenario | str | None) -> None:
    if isinstance(found, str):
        st.caption(f":red[{plain(found)}]")
    elif found:
        page = {"train": "Train", "serve": "Serve"}[found.command]
        st.caption(f"Read as {found.tool}. The page {page} answers it.")
        for title, lines in _lists(found).items():
            if lines:
                st.markdown(f"**{title}**\n" + "\n".join(f"- {plain(line)}" for line in lines))


def _lists(found: Scenario) -> dict[str, tuple[str, ...]]:
    """What is shown of a run; settings that change nothing here are counted."""
    said = tuple(line for line in found.understood if not line.endswith(_NOTHING))
    nothing = len(found.understood) - len(said)
    more = (f"and {nothing} settings that change nothing here",) if nothing else ()
    return {"Not understood": found.not_understood, "Assumed": found.assumed, "Understood": (*said, *more)}
