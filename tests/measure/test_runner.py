"""Whatever happens to a run, its finished rows are saved, the device is free again, and no process stays behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from calc.errors import InputError
from calc.measurements.records import Records
from measure import child
from measure.device_queue import Ticket, queue
from measure.run_options import RunOptions
from measure.runner import run
from measure.workloads import SUITES, WORKLOADS
from tests.measure.runs import PATIENCE, SCRIPT, alive, events_of, finish, is_free, saved, stand_in, started, until


@pytest.fixture(autouse=True)
def own_data(tmp_path, monkeypatch):
    """Each test has its own results and queue."""
    monkeypatch.setenv("PLUMBLINE_DATA", str(tmp_path))


def test_a_run_tells_of_its_start_its_progress_its_rows_and_its_end():
    events = list(events_of("three"))
    kinds = [event["event"] for event in events]
    assert kinds == ["started", "ready", "progress", "row", "progress", "row", "progress", "row", "part", "done"]
    assert events[-1] | {"run": ""} == {"event": "done", "outcome": "finished", "message": "", "run": "", "rows": 3}
    assert saved() == ["row/1", "row/2", "row/3"]
    assert Records().runs()[0].outcome == "finished"
    assert is_free()


def test_a_row_is_saved_before_it_is_told():
    for event in events_of("three"):
        if event["event"] == "row":
            assert event["quantity"] in saved()


def test_a_suite_runs_every_workload_and_passes_over_what_does_not_work():
    options = RunOptions(workload="standard", device="cpu")
    events = list(run(options, threading.Event(), stand_in("suite")))
    names = [event["workload"] for event in events if event["event"] == "ready"]
    assert names == list(SUITES["standard"])
    ended = {event["workload"]: event["outcome"] for event in events if event["event"] == "part"}
    assert {name: outcome for name, outcome in ended.items() if outcome != "finished"} == {
        "pcie": "refused",
        "flops": "failed",
    }
    done = events[-1]
    assert done["outcome"] == "finished"
    assert done["message"].startswith("not measured; pcie: not measurable here: a test says so; flops: RuntimeError")
    assert done["rows"] == len(saved()) == 3 * (len(names) - 2) + 1
    assert [(each.workload, each.outcome) for each in reversed(Records().runs())] == list(ended.items())
    fractions = [event["fraction"] for event in events if event["event"] == "progress"]
    assert fractions == sorted(fractions)
    assert all(event["seconds_left"] >= 0 for event in events if event["event"] == "progress")
    assert is_free()


def test_time_left_begins_at_the_usual_time_and_follows_the_pace(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(child.time, "monotonic", lambda: now[0])
    clock = child.Clock(SUITES["standard"])
    usual = sum(WORKLOADS[name].seconds for name in SUITES["standard"])
    assert usual < 90  # the suite's target on two idle processors
    assert clock.seconds_left(0) == pytest.approx(usual)
    now[0] += 3 * usual / 2
    assert clock.seconds_left(0.5) == pytest.approx(3 * usual / 2, rel=0.25)  # three times slower than usual
    assert clock.fraction("decoder-states", 1) == WORKLOADS["decoder-states"].seconds / usual
    for name in SUITES["standard"]:
        clock.finished(name)
    assert clock.fraction("flops", 0) == pytest.approx(1)


def test_what_libraries_print_does_not_get_between_the_events():
    assert [event["event"] for event in events_of("prints")] == ["started", "ready", "row", "part", "done"]


@pytest.mark.parametrize(
    ("behaviour", "outcome", "message", "rows"),
    [
        ("killed", "failed", "was ended by signal SIGKILL (out of memory, most likely); finished rows are kept", 3),
        ("exits", "failed", "ended with exit status 3 (the driver said: no); finished rows are kept", 1),
        ("raises", "failed", "RuntimeError: the first line the second", 1),
    ],
)
def test_a_run_that_breaks_keeps_its_rows_and_says_why(behaviour, outcome, message, rows):
    *_, done = events_of(behaviour)
    assert done["outcome"] == outcome
    assert message in done["message"]
    assert done["rows"] == len(saved()) == rows
    assert Records().runs()[0].outcome == outcome
    assert is_free()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces RLIMIT_DATA")
def test_a_run_that_takes_more_memory_than_it_may_is_out_of_memory():
    *_, done = events_of("greedy", memory_fraction=0.05)
    assert done["outcome"] == "out of memory"
    assert "choose a smaller size" in done["message"]
    assert saved() == ["row/1"]


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", ["hang", "endless", "floods"])
def test_the_time_limit_ends_a_run_that_does_not_end_itself(behaviour):
    *before, done = events_of(behaviour, seconds=1)
    assert done["outcome"] == "timed out"
    assert "limit of 1 s" in done["message"]
    assert saved() == [event["quantity"] for event in before if event["event"] == "row"]
    assert is_free()


@pytest.mark.slow
def test_cancelling_ends_what_the_run_itself_started():
    cancel = threading.Event()
    grandchild = 0
    for event in events_of("parent", cancel):
        if event["event"] == "row":
            grandchild = event["measured"]
            cancel.set()
    assert grandchild
    until(lambda: not alive(grandchild))


def test_leaving_the_events_early_ends_the_run():
    events = events_of("endless")
    while next(events)["event"] != "row":
        pass
    holder = queue("cpu")[0]["process"]
    events.close()
    assert not alive(holder)
    assert is_free()


def test_a_killed_child_is_noticed_and_its_rows_kept():
    process = started("endless")
    until(lambda: len(saved()) >= 3)
    os.kill(queue("cpu")[0]["process"], signal.SIGKILL)
    events, _, status = finish(process)
    assert events[-1]["outcome"] == "failed"
    assert status == 1
    assert [event["quantity"] for event in events if event["event"] == "row"] == saved()
    assert is_free()


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", ["endless", "hang"])
def test_a_killed_runner_takes_the_child_with_it(behaviour):
    process = started(behaviour)
    until(lambda: len(saved()) >= 3)
    child = queue("cpu")[0]["process"]
    process.kill()
    process.communicate(timeout=PATIENCE)
    until(lambda: not alive(child))
    until(is_free)
    count = len(saved())
    assert saved() == [f"row/{number + 1}" for number in range(count)]
    assert Records().runs()[0].outcome == ""  # nobody was left to write it down


@pytest.mark.slow
def test_a_killed_runner_takes_the_childs_children_with_it():
    process = started("parent")
    until(saved)
    grandchild = Records().rows()[0]["measured"]
    process.kill()
    process.communicate(timeout=PATIENCE)
    until(lambda: not alive(grandchild))


@pytest.mark.slow
def test_the_runner_ends_when_the_page_that_started_it_is_gone():
    """The page's process holds the other end of standard input; its death closes it."""
    process = started("endless", "--attached")
    until(lambda: len(saved()) >= 3)
    child = queue("cpu")[0]["process"]
    process.stdin.close()
    process.stdin = None
    events, _, _ = finish(process)
    assert events[-1]["outcome"] == "cancelled"
    assert not alive(child)
    assert Records().runs()[0].outcome == "cancelled"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cancels_in_order(number):
    process = started("endless")
    until(lambda: len(saved()) >= 2)
    process.send_signal(number)
    events, errors, status = finish(process)
    assert (events[-1]["outcome"], status) == ("cancelled", 1)
    assert errors == "cancelled: cancelled; finished rows are kept\n"
    assert is_free()


@pytest.mark.slow
def test_two_runs_race_for_one_device_and_the_second_waits_its_turn():
    first, second = started("nap"), started("nap")
    runs = [finish(process)[0] for process in (first, second)]
    assert [events[-1]["outcome"] for events in runs] == ["finished", "finished"]
    waited = [events for events in runs if events[0]["event"] == "queued"]
    assert len(waited) == 1
    assert waited[0][0]["ahead"][0]["workload"] == "decoder-states"
    by_run = [row["run"] for row in Records().rows()]
    assert len(by_run) == 4
    assert by_run[0] == by_run[1] != by_run[2] == by_run[3]  # one after the other, never in turns


@pytest.mark.slow
def test_the_clock_of_a_waiting_run_stands_still():
    with Ticket("cpu", {"workload": "another"}):
        process = started("three", "--seconds", "1")
        until(lambda: len(queue("cpu")) == 2)
        time.sleep(1.2)
        assert process.poll() is None
    events, _, _ = finish(process)
    assert events[-1]["outcome"] == "finished"


def test_a_waiting_run_can_be_cancelled():
    with Ticket("cpu", {"workload": "another", "process": os.getpid()}):
        cancel = threading.Event()
        events = []
        for event in events_of("three", cancel):
            events.append(event)
            cancel.set()
        assert [event["event"] for event in events] == ["queued", "done"]
        assert events[-1]["outcome"] == "cancelled"
        assert len(queue("cpu")) == 1


def test_a_ticket_of_a_dead_process_stops_nobody(tmp_path):
    folder = tmp_path / "queue" / "cpu"
    folder.mkdir(parents=True)
    (folder / "7.ticket").write_text('{"workload": "of a process that was killed"}')
    assert queue("cpu") == []
    with Ticket("cpu", {}) as ticket:
        assert ticket.ahead() == []
    assert [path.name for path in folder.iterdir()] == ["gate"]


def test_the_queue_is_first_come_first_served():
    with (
        Ticket("cpu", {"name": "a"}) as first,
        Ticket("cpu", {"name": "b"}) as second,
        Ticket("cpu", {"name": "c"}) as third,
    ):
        assert first.ahead() == []
        assert second.ahead() == [{"name": "a"}]
        assert third.ahead() == [{"name": "a"}, {"name": "b"}]
        with Ticket("cuda-0", {}) as other:
            assert other.ahead() == []


def test_a_corrupt_store_is_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "results.sqlite3").write_bytes(b"not a database at all" * 100)
    *before, done = events_of("three")
    assert done["outcome"] == "refused"
    assert "file is not a database" in done["message"]
    assert not [event for event in before if event["event"] == "row"]
    assert (tmp_path / "results.sqlite3").read_bytes() == b"not a database at all" * 100


def test_a_data_folder_that_is_a_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PLUMBLINE_DATA", str(tmp_path / "file"))
    *_, done = events_of("three")
    assert done["outcome"] == "refused"
    assert "PLUMBLINE_DATA" in done["message"]
    with pytest.raises(InputError, match="PLUMBLINE_DATA"):
        queue("cpu")


def test_the_runner_says_what_it_does_on_standard_error_and_prints_the_rows():
    path = str(SCRIPT.parents[2])
    command = [sys.executable, str(SCRIPT), "three", "run", "decoder-states", "--device", "cpu", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path})
    assert [row["quantity"] for row in json.loads(done.stdout)] == ["row/1", "row/2", "row/3"]
    assert "100% row 3" in done.stderr
