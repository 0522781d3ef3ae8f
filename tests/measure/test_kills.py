"""Kills at random moments of whatever measures: no row that was told is lost, every reader is answered, nothing stays behind.

`make test` kills a few times, `make test-all` a hundred times, thirty of them while the store is written.
"""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from calc.measurements.records import Measured, Records
from measure.device_queue import queue
from tests.measure.runs import alive, finish, is_free, saved, started, until
from tests.recorded.recording import settings

WHOLE = settings["recorded"] == "all"
RUNS, WRITES = (70, 30) if WHOLE else (4, 3)

WRITER = """
import sys
from pathlib import Path
from calc.measurements.records import Measured, Records
store = Records(Path(sys.argv[1]))
store.begin("run", "w", {}, {})
for number in range(10**6):
    store.add("run", Measured("x" * 3000, str(number), 1, 1, "bytes"))
    print(number, flush=True)
"""


@pytest.fixture(autouse=True)
def own_data(tmp_path, monkeypatch):
    """Each test has its own results and queue."""
    monkeypatch.setenv("PLUMBLINE_DATA", str(tmp_path))


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_loses_no_row_that_it_said_was_saved(tmp_path):
    moments = random.Random(15)
    for each in range(WRITES):
        store = Records(tmp_path / f"{each}.sqlite3")
        with subprocess.Popen([sys.executable, "-c", WRITER, store.path], stdout=subprocess.PIPE) as writer:
            assert writer.stdout.readline() == b"0\n"
            time.sleep(moments.uniform(0, 0.05))  # the moment: a delay is what is drawn, nothing waits for it
            writer.kill()
            told = [0, *map(int, writer.stdout.read().splitlines())]
        kept = [int(row["quantity"]) for row in store.rows()]
        assert kept[: len(told)] == told  # one more may have been saved, and not been said any more
        assert len(kept) <= len(told) + 1
        store.add("run", Measured("c", "after", 1, 1, "bytes"))
        with sqlite3.connect(store.path) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        connection.close()


@pytest.mark.slow
def test_a_child_or_a_runner_killed_at_any_moment_leaves_the_rows_and_nothing_else():
    moments = random.Random(16)
    for each in range(RUNS):
        before = saved()
        process = started("endless", bufsize=0)  # what is not read yet stays in the pipe
        whom = ("child", "runner", "both")[each % 3]
        told, wanted, ours = [], moments.randrange(1, 12), set()
        for line in process.stdout:
            told.append(json.loads(line))
            ours |= {ticket["process"] for ticket in queue("cpu")}
            if len(told) == wanted + 2:  # started and ready come before the rows
                break
        if whom != "runner":
            for child in ours:
                os.kill(child, signal.SIGKILL)
        if whom != "child":
            process.kill()
        more, *_ = finish(process)
        rows = [event["quantity"] for event in (*told, *more) if event["event"] == "row"]
        until(is_free)
        until(lambda ours=ours: not any(alive(child) for child in ours))
        kept = saved()[len(before) :]
        assert kept[: len(rows)] == rows
        assert len(rows) >= wanted
        assert not list(Path(os.environ["PLUMBLINE_DATA"]).rglob("*.ticket"))
    Records().begin("after", "w", {}, {})  # no lock is left
    assert Records().runs()[0].id == "after"
