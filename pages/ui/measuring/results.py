"""Views of what is measured: this machine, a run as it goes, predicted against measured, what was measured before."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from calc.breakdown import safe_cell
from calc.measurements.imported import compared, imported, machine_of
from calc.measurements.records import Records, as_csv, as_json
from calc.measurements.roofline import rooflines
from calc.units import show_bytes, show_seconds, show_value
from pages.ui.measuring import roofline, runs, store
from pages.ui.measuring.runs import MeasurePlan, Progress
from pages.ui.text import plain

_POLL_SECONDS = 1.0
_MOST_WAITING = 2  # waiting runs that a page draws, again and again: each costs the server time, for every browser
_OWN = "own runs"  # the keys of those that this browser started


@st.cache_data(ttl=600, show_spinner="Looking at this machine…")
def _machine() -> Mapping[str, Any]:
    """What `python -m measure devices` says; seconds, since it imports torch (in a process of its own)."""
    found: Mapping[str, Any] = runs.ask("devices")
    return found


@st.cache_data(show_spinner=False)
def _workloads() -> Mapping[str, Mapping[str, str]]:
    return {row["name"]: row for row in runs.ask("list")}


def machine() -> None:
    """What can be measured on here, and what cannot and why."""
    found = _machine()
    for device in found["devices"]:
        st.markdown(f"**{plain(device['name'])}**: {plain(device['title'])}, {show_bytes(device['memory_bytes'])}")
    for note in found["notes"]:
        st.caption(plain(note))


def about(plan: MeasurePlan) -> None:
    """What the chosen workload tests and needs."""
    row = _workloads()[plan.workload]
    st.markdown(f"**Tests** {plain(row['tests'])}. **Needs** {plain(row['needs'])}.")


def begin(plan: MeasurePlan, model: str) -> None:
    """Start a run, which this browser then sees first. InputError when it may not, or the server has as many as it takes."""
    runs.check()
    own = st.session_state.setdefault(_OWN, [])
    own.append(runs.start(plan, model=model))


def live() -> None:
    """The runs of this server: those under way, redrawn as they go, and this browser's last once it has ended, or anyone's."""
    known = runs.runs()
    under_way = [run for run in known if not run.outcome]
    ended = [run for run in known if run.outcome]
    newest = _newest()
    own_has_ended = bool(newest and newest.outcome)
    if under_way:
        pace = _pace(len(under_way))
        st.fragment(_under_way, run_every=pace)(pace, own_has_ended)
    if newest and own_has_ended:
        result(newest)
    elif ended and not under_way:
        result(ended[-1])


def _newest() -> Progress | None:
    """The run that this browser started last, if the server still knows it."""
    own = st.session_state.get(_OWN)
    return runs.progress(own[-1]) if own else None


def _pace(going: int) -> float:
    """Seconds from one redraw to the next: many runs are many browsers, and the server draws for each of them."""
    return _POLL_SECONDS * max(1, going // 4)


def _under_way(pace: float, own_had_ended: bool) -> None:
    """The runs that go on; once none does, or this browser's has ended, the whole page is drawn again.

    Of many that wait, this browser's own come first.
    """
    going = [run for run in runs.runs() if not run.outcome]
    newest = _newest()
    if not going or _pace(len(going)) != pace or bool(newest and newest.outcome) != own_had_ended:
        st.rerun()
    waiting = [run for run in going if run.ahead]
    own = st.session_state.get(_OWN, ())
    shown = sorted(waiting, key=lambda run: run.key not in own)[:_MOST_WAITING]
    for run in [*(run for run in going if not run.ahead), *shown]:
        st.progress(run.fraction, text=plain(_line(run, own=len(going) > 1 and run.key in own)))
        st.button(
            "Cancel",
            key=runs.action_key(f"cancel {run.key}"),
            on_click=_cancel,
            args=(run.key,),
            icon=":material/stop:",
            disabled=bool(runs.hindrance()),
        )
        if run.rows and (run.key in own or not any(each.key in own for each in waiting)):
            _table(run.rows)
    if len(waiting) > len(shown):
        st.caption(f"{len(waiting) - len(shown)} more wait.")


def _cancel(key: str) -> None:
    if not runs.hindrance():
        runs.cancel(key)


def _line(run: Progress, own: bool) -> str:
    """What a run is doing, in a line."""
    title = f"{run.title} (yours)" if own else run.title
    if run.ahead:
        first = run.ahead[0]
        return f"{title}: {run.message}; {first.get('workload', 'another run')} has it, {len(run.ahead)} ahead"
    left = f"; about {show_seconds(run.seconds_left)} left" if run.seconds_left else ""
    return f"{title}: {run.message}{left}"


def result(run: Progress) -> None:
    """A run that has ended: how, and its rows to read and to take home."""
    if run.outcome == "finished":
        st.success(
            plain(f"{run.title}: finished on {run.environment['device']}, {len(run.rows)} rows"),
            icon=":material/check:",
        )
        if run.message:  # what a suite passed over
            st.caption(plain(run.message))
    else:
        st.warning(plain(f"{run.title}: {run.outcome}. {run.message}"), icon=":material/info:")
    if run.rows:
        _table(run.rows)
        roofline.against(run.rows, f"against {run.key}")
        _download("CSV", run.csv, f"{run.title.replace(', ', '-')}.csv", "text/csv")


def _table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Predicted against measured, a tab for each workload of a suite."""
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    if len(workloads) == 1:
        _cases(rows)
        return
    for tab, workload in zip(st.tabs(workloads), workloads, strict=True):
        with tab:
            _cases([row for row in rows if row["workload"] == workload])


def _cases(rows: Sequence[Mapping[str, Any]]) -> None:
    """Predicted against measured by path, one table for each case; values to read and exact."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    for tab, case in zip(st.tabs(cases), cases, strict=True):
        here = [row for row in rows if row["case"] == case]
        frame = pd.DataFrame(
            {
                # the table has a download of its own
                "Quantity": [safe_cell(row["quantity"].replace("/", " › ").replace("_", " ")) for row in here],
                "Predicted": [_read(row, "predicted") for row in here],
                "Measured": [_read(row, "measured") for row in here],
                "Error": ["" if row["relative_error"] is None else f"{row['relative_error']:+.2%}" for row in here],
                "Exact predicted": [_exact(row["predicted"]) for row in here],
                "Exact measured": [_exact(row["measured"]) for row in here],
                "20 to 80 %": [_spread(row) for row in here],
            }
        )
        tab.dataframe(frame, hide_index=True)


def _read(row: Mapping[str, Any], side: str) -> str:
    value = row[side]
    if value is None:
        return "unknown" if side == "predicted" else ""
    return show_value(value, row["unit"]) if row["unit"] in ("bytes", "seconds") else f"{value:,.4g} {row['unit']}"


def _exact(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.12g}"


def _spread(row: Mapping[str, Any]) -> str:
    return "" if row["p20"] is None else f"{row['p20']:,.4g} to {row['p80']:,.4g}"


def roofs(records: Records) -> None:
    """The roofline of each machine that has a kernel on it."""
    found = {each.machine: each for each in rooflines(store.rows(records))}
    if not found:
        return
    with st.expander("Roofline", icon=":material/roofing:"):
        name = st.selectbox("Machine", list(found), index=len(found) - 1)
        roofline.roofline(found[name], "roofline")
        st.caption(
            "A kernel's place: FLOPs a byte by its formulas, FLOP/s as measured (median, the newest run). What a cache holds can "
            "stand above the memory's roof."
        )


def comparison(records: Records) -> None:
    """The newest results of two machines side by side, this one's or imported."""
    rows = store.rows(records)
    machines = list(dict.fromkeys(machine_of(row["environment"]) for row in rows))
    if len(machines) < 2:
        return
    with st.expander("Compare two machines", icon=":material/compare_arrows:"):
        with st.container(horizontal=True):
            first = st.selectbox("First machine", machines)
            second = st.selectbox("Second machine", machines, index=len(machines) - 1)
        st.dataframe(
            pd.DataFrame(compared(rows, first, second))
            .drop(columns=["first_machine", "second_machine"])
            .map(safe_cell),
            hide_index=True,
        )
        st.code(
            shlex.join(("python", "-m", "measure", "results", "--compare", first, second)),
            language="bash",
            wrap_lines=True,
        )


def take(records: Records) -> None:
    """A file of someone else's results, taken in once the button is pressed."""
    file = st.file_uploader(
        "Someone else's results",
        ("csv", "json"),
        help="The CSV or JSON that this page or `python -m measure results` gives.",
    )
    if file and st.button("Take them in", key=runs.action_key("take"), icon=":material/upload:"):
        runs.check()
        found = imported(file.getvalue(), file.name)
        count = records.take(found)
        st.success(plain(f"{count:,} rows of {len(found):,} runs were taken in, from {file.name}."))


def history(records: Records) -> None:
    """What was measured before, by any program of this user, to read and to take home."""
    with st.expander("Measured before", icon=":material/history:"):
        known = records.runs()
        if not known:
            st.caption("Nothing yet.")
            return
        st.dataframe(
            pd.DataFrame(
                {
                    "Started": [run.started.replace("T", " ").removesuffix("+00:00") + " UTC" for run in known],
                    "Workload": [run.workload for run in known],
                    "Machine": [machine_of(run.environment) for run in known],
                    "Ended": [run.outcome or "not known" for run in known],
                }
            ).map(safe_cell),
            hide_index=True,
        )
        with st.container(horizontal=True):
            _download("All as CSV", lambda: as_csv(store.rows(records)), "measured.csv", "text/csv")
            _download("All as JSON", lambda: as_json(store.rows(records)), "measured.json", "application/json")
        st.caption(plain(f"Kept in {records.path}"))


def _download(label: str, make: Callable[[], str], name: str, kind: str) -> None:
    """A download that is made when it is asked for, not at every redraw."""
    st.download_button(label, make, name, kind, key=f"download {name}", on_click="ignore", icon=":material/download:")
