"""'Check with a trace': the same step run by PyTorch with fake tensors, in a process of its own, against the prediction."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import streamlit as st

from calc.commands import COMMANDS
from calc.errors import InputError
from calc.model.config import parse_config
from calc.training import TrainingAnswer
from pages.ui.appearance import CUSTOM
from pages.ui.measuring import runs
from pages.ui.measuring.runs import MEASURE, Handle, Progress
from pages.ui.numbers import Numbers
from pages.ui.scenario import Scenario
from pages.ui.text import plain

_COMMAND = replace(COMMANDS["train"], name="trace")  # which takes the flags of `train`
_POLL_SECONDS = 0.5
_MOST = 8  # traces at once in this server; all but one of them wait
_KEPT = 20  # ended traces that the server remembers

Asked = tuple[str, bytes]  # the command line, and the config where the model is the user's own

_traces: dict[Asked, Handle] = {}
_lock = threading.Lock()


def check(answer: TrainingAnswer, numbers: Numbers, scenario: Scenario) -> None:
    """A button that starts the trace of this scenario, how far it is, and what came of it. A line with MEASURE=off."""
    if not runs.is_offered():
        st.info("Tracing is switched off on this server (MEASURE=off).")
        return
    asked = _asked(answer, scenario)
    found = _traces.get(asked)
    if found and not found.progress.outcome:
        st.fragment(_under_way, run_every=_POLL_SECONDS)(asked)
        return
    hindrance = runs.why_not_installed() or runs.hindrance()
    if st.button(
        "Check with a trace",
        key=runs.action_key("trace"),
        icon=":material/fact_check:",
        disabled=bool(hindrance),
        help="Runs the real training step with fake tensors: no GPU, no memory, seconds.",
    ):
        runs.check()
        start(asked)
        st.rerun()
    if hindrance:
        st.caption(plain(hindrance))
    if found:
        _ended(found.progress, numbers)


def start(asked: Asked) -> None:
    """Start a trace, in place of an ended one that was asked the same. InputError when this server has as many as it takes."""
    words, config = asked
    line = json.dumps(parse_config(config)).encode() + b"\n" if config else b""
    with _lock:
        ended = [key for key, handle in _traces.items() if handle.progress.outcome]
        if len(_traces) - len(ended) >= _MOST:
            raise InputError(f"trace: {_MOST} traces are waiting or running already; let some end first")
        for key in ended[:-_KEPT]:
            del _traces[key]
        _traces[asked] = Handle("trace", [*shlex.split(words)[3:], "--compare"], MEASURE, line)


def _asked(answer: TrainingAnswer, scenario: Scenario) -> Asked:
    own = scenario.subject.model == CUSTOM
    words = scenario.command_line(_COMMAND, answer.plan, "measure", "-" if own else "")
    return words, scenario.config.encode() if own else b""


def _under_way(asked: Asked) -> None:
    """How far the trace is, with a button that ends it; once it has ended, the whole page is drawn again."""
    handle = _traces.get(asked)
    if handle is None or handle.progress.outcome:
        st.rerun()
        return
    known = handle.progress
    waits = f"; {len(known.ahead)} ahead" if known.ahead else ""
    st.progress(known.fraction, text=plain(f"{known.message}{waits}"))
    st.button(
        "Cancel",
        key=runs.action_key("cancel trace"),
        on_click=_cancel,
        args=(handle,),
        icon=":material/stop:",
        disabled=bool(runs.hindrance()),
    )


def _cancel(handle: Handle) -> None:
    if not runs.hindrance():
        handle.cancel()


def _ended(known: Progress, numbers: Numbers) -> None:
    """Prediction and trace of the peak by path; or why there is none."""
    if known.answer is None:
        why = "" if known.message == known.outcome else f": {known.message}"
        st.warning(plain(f"Trace {known.outcome}{why}"), icon=":material/info:")
        return
    _compared(known.answer, numbers)


def _compared(answer: Mapping[str, Any], numbers: Numbers) -> None:
    rows = answer["compared"]
    total = rows[-1]
    error = f"{total['error']:+.2%}" if total["error"] is not None else "unknown"
    st.markdown(
        plain(
            f"Peak predicted {numbers.show(total['predicted'])}, traced {numbers.show(total['traced'])}: error {error}"
        )
    )
    frame = {
        "Part": [row["path"].replace("/", " › ").replace("_", " ") for row in rows],
        "Predicted": [_shown(row["predicted"], numbers) for row in rows],
        "Traced": [_shown(row["traced"], numbers) for row in rows],
        "Error": [row["error"] for row in rows],
        "Predicted bytes": [row["predicted"] for row in rows],
        "Traced bytes": [row["traced"] for row in rows],
    }
    st.dataframe(frame, hide_index=True, column_config={"Error": st.column_config.NumberColumn(format="percent")})
    source = next((row["source"] for row in answer["components"]), "")
    st.caption(
        plain(f"{source}; {answer['layers_run']} of {answer['layers']} layers run. " + "; ".join(answer["assumptions"]))
    )


def _shown(value: float | None, numbers: Numbers) -> str:
    return "" if value is None else numbers.show(value)
