"""The page's side of a run: it starts another process, listens, can cancel, and loses nothing when that process is lost."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from calc.errors import InputError
from calc.measurements.records import Records
from measure.device_queue import queue
from measure.run_options import RunOptions
from measure.setting import SIZES
from measure.workloads import SUITES, WORKLOADS
from pages.ui.measuring import runs
from pages.ui.measuring.runs import MeasurePlan, Progress, refusal

SCRIPT = Path(__file__).parents[1] / "measure" / "misbehaving.py"
PLAN = MeasurePlan(device="cpu")
PATIENCE = 20.0


@pytest.fixture(autouse=True)
def own_data(tmp_path, monkeypatch):
    monkeypatch.setenv("PLUMBLINE_DATA", str(tmp_path))
    monkeypatch.setattr(runs, "_runs", {})
    monkeypatch.delenv("MEASURE", raising=False)


def start(behaviour):
    """Start a run whose process behaves as asked."""
    return runs.start(PLAN, (sys.executable, str(SCRIPT), behaviour))


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
    return found


def ended(key):
    return until(lambda: (known := runs.progress(key)) and known.outcome and known)


def test_a_run_is_followed_to_its_end():
    done = ended(start("three"))
    assert (done.outcome, done.fraction) == ("finished", 1.0)
    assert [row["quantity"] for row in done.rows] == ["row/1", "row/2", "row/3"]
    assert done.environment["device"] == "a test's processor"
    assert done.csv().splitlines()[1].startswith("decoder-states,a test,row/1,512,512,0.0,bytes")


def test_a_run_is_cancelled_and_its_rows_are_kept():
    key = start("endless")
    until(lambda: len(runs.progress(key).rows) >= 3)
    runs.cancel(key)
    done = ended(key)
    assert done.outcome == "cancelled"
    assert [row["quantity"] for row in done.rows] == [row["quantity"] for row in Records().rows()]
    until(lambda: queue("cpu") == [])
    runs.cancel(key)  # again: nothing happens
    runs.cancel("unknown")


@pytest.mark.slow
def test_a_runner_that_is_killed_is_a_message_not_a_hang():
    key = start("endless")
    until(lambda: runs.progress(key).rows)
    os.kill(runs._runs[key]._process.pid, signal.SIGKILL)
    done = ended(key)
    assert (done.outcome, done.message) == ("failed", "it ended with status -9")
    assert done.rows
    until(lambda: queue("cpu") == [])


def test_a_refusal_is_told(tmp_path):
    (tmp_path / "results.sqlite3").write_bytes(b"no database" * 1000)
    done = ended(start("three"))
    assert done.outcome == "refused"
    assert "file is not a database" in done.message


def test_a_command_that_cannot_start_is_told():
    done = ended(runs.start(PLAN, (sys.executable, "-c", "import sys; sys.exit('one line of complaint')")))
    assert (done.outcome, done.message) == ("failed", "one line of complaint")


@pytest.mark.slow
def test_there_is_a_limit_to_the_runs_of_one_server(monkeypatch):
    monkeypatch.setattr(runs, "_MOST", 1)
    key = start("hang")
    with pytest.raises(InputError, match="1 runs are waiting or running"):
        start("three")
    runs.cancel(key)
    ended(key)
    ended(start("three"))


@pytest.mark.slow
def test_ended_runs_are_forgotten_in_time(monkeypatch):
    monkeypatch.setattr(runs, "_KEPT", 1)
    keys = [start("three")]
    for _ in range(3):
        ended(keys[-1])
        keys.append(start("three"))
    ended(keys[-1])
    assert [run.key for run in runs.runs()] == keys[-2:]


def test_time_left_is_told_once_there_is_progress():
    began = time.monotonic() - 10
    assert Progress("k", "t", 0.0).seconds_left is None
    assert Progress("k", "t", began).seconds_left is None
    assert Progress("k", "t", began, fraction=0.25).seconds_left == pytest.approx(30, abs=1)
    assert Progress("k", "t", began, fraction=1.0, outcome="finished").seconds_left is None


def test_the_page_offers_what_the_command_takes():
    assert set(MeasurePlan.model_fields["workload"].annotation.__args__) == {*WORKLOADS, *SUITES}
    assert MeasurePlan.model_fields["size"].annotation.__args__ == SIZES
    for name, field in MeasurePlan.model_fields.items():
        if name not in ("workload", "own_model"):
            assert (field.default or 0) == (RunOptions.model_fields[name].default or 0)  # left out is 0 there
            of_page, of_command = (
                [str(rule) for rule in one.metadata if "func" not in str(rule)]
                for one in (field, RunOptions.model_fields[name])
            )
            assert of_page == (of_command if name != "ranks" else ["Ge(ge=1)", *of_command[1:]])
    for device in MeasurePlan.model_fields["device"].annotation.__args__:
        assert RunOptions(workload="decoder-states", device=device).device == device


def test_the_command_line_of_a_plan_leaves_defaults_out():
    assert MeasurePlan().arguments("llama-2-7b") == ("run", "decoder-states")
    own = MeasurePlan(workload="lora", own_model=True)
    assert own.arguments("llama-2-7b") == ("run", "lora", "--model", "llama-2-7b")
    plan = MeasurePlan(workload="memory-bandwidth", size="medium", memory_fraction=0.5)
    assert plan.arguments() == ("run", "memory-bandwidth", "--size", "medium", "--memory-fraction", "0.5")
    several = MeasurePlan(workload="collectives", ranks=4)
    assert several.arguments() == ("run", "collectives", "--ranks", "4")


@pytest.mark.parametrize(
    ("headers", "address", "allowed"),
    [
        ({"Host": "localhost:8501"}, None, True),
        ({"Host": "127.0.0.1:8501"}, "127.0.0.1", True),
        ({"Host": "[::1]:8501"}, "::1", True),
        ({"Host": "[::1]"}, None, True),
        ({}, None, True),
        ({"Host": "localhost:8501"}, "192.168.1.7", False),
        ({"Host": "192.168.1.5:8501"}, None, False),
        ({"Host": "evil.example:8501"}, None, False),
        ({"Host": "localhost", "X-Forwarded-For": "203.0.113.9"}, None, False),
        ({"host": "localhost", "forwarded": "for=203.0.113.9"}, None, False),
    ],
)
def test_only_a_browser_on_this_machine_may_start_a_run(headers, address, allowed):
    assert (refusal(headers, address) == "") is allowed


def test_measuring_can_be_switched_off_and_opened_to_all(monkeypatch):
    monkeypatch.setenv("MEASURE", "anyone")
    assert refusal({"Host": "lab.example"}, "203.0.113.9") == ""
    monkeypatch.setenv("MEASURE", "off")
    assert not runs.is_offered()
    assert "MEASURE=off" in refusal({"Host": "localhost"}, None)


@pytest.mark.parametrize(
    ("files", "found", "message"),
    [
        ({}, True, ""),
        ({}, False, "not installed in this Python"),
        ({".measuring-installing": str(os.getpid())}, False, "being installed"),
        ({".measuring-installing": "999999999"}, True, ""),  # the installation was killed
        ({".measuring-installing": "not a number"}, True, ""),
        ({".measuring-failed": ""}, False, "runs.log"),
    ],
)
def test_the_page_says_what_keeps_it_from_measuring(monkeypatch, tmp_path, files, found, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(runs.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(runs, "find_spec", lambda name: object() if found else None)
    assert message in runs.why_not_installed()
    assert bool(runs.why_not_installed()) is bool(message)


def test_a_question_is_answered_or_refused_in_one_line():
    assert runs.ask("list")[0]["name"] == "decoder-states"
    with pytest.raises(InputError, match="'nonsense' is not allowed"):
        runs.ask("nonsense")
    with pytest.raises(InputError, match="no answer within"):
        runs.ask("list", seconds=0.001)


@pytest.mark.slow
def test_twenty_presses_at_once_run_one_after_the_other_and_lose_nothing():
    for key in [start("three") for _ in range(20)]:
        assert ended(key).outcome == "finished"
    runs = [row["run"] for row in Records().rows()]
    assert len(runs) == 60
    assert all(
        len(set(runs[at : at + 3])) == 1 for at in range(0, 60, 3)
    )  # each run's rows together: never two at a time
    assert queue("cpu") == []
