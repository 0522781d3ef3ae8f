"""A disk that fills during a run, cancels at random moments, a race for the device: no finished row is lost, nothing stays behind."""

import csv
import io
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from calc.measurements.records import Records, as_csv
from measure.device_queue import queue
from tests.measure.runs import alive, events_of, finish, is_free, saved, started

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_data(tmp_path, monkeypatch):
    """Each test has its own results and queue."""
    monkeypatch.setenv("PLUMBLINE_DATA", str(tmp_path))


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A disk of 256 KiB where results are kept; gives a function that makes it larger."""
    place = tmp_path / "disk"
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if sys.platform != "linux" or os.geteuid() or subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    monkeypatch.setenv("PLUMBLINE_DATA", str(place))
    yield lambda: subprocess.run(["mount", "-o", "remount,size=8m", str(place)], check=True)
    subprocess.run(["umount", str(place)], check=True)


def measure(*arguments, out=subprocess.PIPE):
    return subprocess.run(
        [sys.executable, "-m", "measure", *arguments],
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=False,
    )


def check_that_no_told_row_is_lost(events):
    """All rows but the last, which found no room, are in the store; the last was told, and so can be read and taken home."""
    rows = [event["quantity"] for event in events if event["event"] == "row"]
    assert len(rows) > 5
    assert saved() == rows[:-1]
    assert events[-1]["rows"] == len(rows)
    assert is_free()


def test_a_disk_that_fills_during_a_run_ends_it_and_loses_no_row(disk, tmp_path):
    events, errors, status = finish(started("fills"))
    check_that_no_told_row_is_lost(events)
    assert (events[-1]["outcome"], status) == ("refused", 2)
    assert errors.endswith(
        "cannot grow: the disk is full; what was saved before is kept; make room, or set PLUMBLINE_DATA to another folder\n"
    )
    kept = Records().rows()
    with Path(os.environ["PLUMBLINE_DATA"], "filler").open("wb", buffering=0) as filler:
        while filler.write(b"0" * 2**16) == 2**16:  # to the last byte
            pass
    # nothing new begins, everything old can be read
    *_, done = events_of("three")
    assert done["outcome"] == "refused"
    assert is_free()
    assert Records().rows() == kept
    with Path(os.environ["PLUMBLINE_DATA"], "export.csv").open("w") as export:
        exported = measure("results", "--format", "csv", out=export)
    assert (exported.returncode, exported.stderr) == (
        1,
        "standard output: it cannot be written (No space left on device); the answer is cut\n",
    )
    assert list(csv.DictReader(io.StringIO(measure("results", "--format", "csv").stdout))) == list(
        csv.DictReader(io.StringIO(as_csv(kept)))
    )
    disk()
    *_, done = events_of("three")
    assert done["outcome"] == "finished"
    assert saved() == [row["quantity"] for row in kept] + ["row/1", "row/2", "row/3"]


def test_a_limit_on_the_size_of_files_ends_a_run_as_a_full_disk_does():
    limit = 2**18

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    events, errors, status = finish(started("fills", preexec_fn=limited))
    check_that_no_told_row_is_lost(events)
    assert (events[-1]["outcome"], status) == ("refused", 2)
    assert "cannot be used (disk I/O error)" in errors
    *_, done = events_of("three")  # without the limit all goes on
    assert done["outcome"] == "finished"


def test_the_row_that_a_full_disk_kept_out_of_the_store_is_printed(tmp_path):
    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, 2**17))

    process = started("fills", "--format", "csv", preexec_fn=limited)
    out, _ = process.communicate(timeout=60)
    printed = [row["quantity"] for row in csv.DictReader(io.StringIO(out.decode()))]
    assert printed[:-1] == saved()
    assert len(printed) > 5


@pytest.mark.slow
def test_ten_cancels_at_random_moments_lose_no_row_and_leave_nothing():
    """A moment is a number of events that have come: before the start, while the device is waited for, between any two rows."""
    moments = random.Random(11)
    for _ in range(10):
        moment = moments.randrange(25)
        cancel, events, processes = threading.Event(), [], set()
        if moment == 0:
            cancel.set()
        for event in events_of("endless", cancel):
            events.append(event)
            processes |= {ticket["process"] for ticket in queue("cpu")}
            if len(events) == moment:
                cancel.set()
        rows = [event["quantity"] for event in events if event["event"] == "row"]
        assert events[-1]["outcome"] == "cancelled"
        assert events[-1]["rows"] == len(rows) >= moment - 2  # started and ready come before the rows
        if events[-1]["run"]:
            kept = [row["quantity"] for row in Records().rows(run=events[-1]["run"])]
            assert kept[: len(rows)] == rows  # one more may have been saved, and not been told any more
            assert len(kept) <= len(rows) + 1
        assert is_free()
        assert not any(alive(process) for process in processes)


@pytest.mark.slow
def test_five_runs_that_race_for_one_device_have_it_one_after_the_other():
    racers = [started("three") for _ in range(5)]
    streams = [finish(process)[0] for process in racers]
    assert [events[-1]["outcome"] for events in streams] == ["finished"] * 5
    runs = [row["run"] for row in Records().rows()]
    assert len(runs) == 15
    assert all(len(set(runs[at : at + 3])) == 1 for at in range(0, 15, 3))  # never in turns
    assert is_free()
