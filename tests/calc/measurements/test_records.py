"""The store of results: what is saved stays saved, and what is not ours is left as it was."""

import csv
import io
import json
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from calc.errors import InputError
from calc.measurements.records import COLUMNS, LARGEST_LIST, SCHEMA, Measured, Records, as_csv, as_json, data_directory

ENVIRONMENT = {"device": "cpu", "torch": "2.13.0"}
ROW = Measured("small, fp32", "parameters/head/weight", 4_194_304, 4_194_304, "bytes")


@pytest.fixture
def records(tmp_path):
    store = Records(tmp_path / "folder" / "results.sqlite3")
    store.begin("run-1", "decoder-states", {"size": "small"}, ENVIRONMENT)
    return store


def test_a_row_comes_back_exactly_with_its_environment(records):
    records.add("run-1", ROW)
    records.add("run-1", Measured("64 MiB", "bandwidth/torch", 3.35e12, 2.9e12, "bytes/s", 2.8e12, 3.0e12))
    first, second = records.rows()
    assert first["measured"] == 4_194_304
    assert isinstance(first["measured"], int)
    assert first["relative_error"] == 0.0
    assert first["environment"] == ENVIRONMENT
    assert second["relative_error"] == (2.9e12 - 3.35e12) / 2.9e12
    assert set(COLUMNS) <= set(first)


def test_bytes_above_what_a_double_holds_stay_exact(records):
    records.add("run-1", ROW._replace(measured=2**53 + 1))
    assert records.rows()[0]["measured"] == 2**53 + 1


@pytest.mark.parametrize("missing", ["predicted", "measured"])
def test_a_row_that_lacks_a_side_has_no_error_and_stays_visible(records, missing):
    records.add("run-1", ROW._replace(**{missing: None}))
    row = records.rows()[0]
    assert row[missing] is None
    assert row["relative_error"] is None


def test_rows_are_filtered_by_workload_and_run(records):
    records.begin("run-2", "copy-bandwidth", {}, ENVIRONMENT)
    records.add("run-1", ROW)
    records.add("run-2", ROW)
    assert [row["run"] for row in records.rows(workload="copy-bandwidth")] == ["run-2"]
    assert [row["run"] for row in records.rows(run="run-1")] == ["run-1"]
    assert [run.id for run in records.runs()] == ["run-2", "run-1"]


def test_a_run_tells_how_it_ended(records):
    assert records.runs()[0].outcome == ""
    records.end("run-1", "timed out", "after 60 s")
    run = records.runs()[0]
    assert (run.outcome, run.message, run.options) == ("timed out", "after 60 s", {"size": "small"})


def test_csv_and_json_hold_the_same_exact_numbers(records):
    records.add("run-1", ROW)
    rows = records.rows()
    (line,) = csv.DictReader(io.StringIO(as_csv(rows)))
    assert int(line["measured"]) == json.loads(as_json(rows))[0]["measured"] == 4_194_304
    assert json.loads(line["environment"]) == ENVIRONMENT
    assert tuple(line)[: len(COLUMNS)] == COLUMNS


def test_without_a_file_there_are_no_rows_and_none_is_made(tmp_path):
    store = Records(tmp_path / "results.sqlite3")
    assert store.rows() == store.runs() == []
    assert list(tmp_path.iterdir()) == []


def test_an_empty_file_that_another_process_is_laying_out_has_no_rows(tmp_path):
    (tmp_path / "results.sqlite3").touch()
    assert Records(tmp_path / "results.sqlite3").rows() == []


def test_the_list_is_bounded_and_keeps_the_newest(records):
    values = [("run-1", "c", str(number), 1, 1, "bytes") for number in range(LARGEST_LIST + 5)]
    with sqlite3.connect(records.path) as connection:
        connection.executemany(
            'INSERT INTO rows (run, "case", quantity, predicted, measured, unit) VALUES (?,?,?,?,?,?)', values
        )
    connection.close()
    rows = records.rows()
    assert len(rows) == LARGEST_LIST
    assert rows[-1]["quantity"] == str(LARGEST_LIST + 4)


def refused(store: Records, message: str) -> None:
    """Every operation of the store refuses with that message, and the file stays as it was."""
    before = store.path.read_bytes() if store.path.is_file() else None
    for operation in (store.rows, store.runs, lambda: store.add("r", ROW), lambda: store.begin("r", "w", {}, {})):
        with pytest.raises(InputError, match=message) as caught:
            operation()
        assert str(store.path) in str(caught.value)
    assert (store.path.read_bytes() if store.path.is_file() else None) == before


def test_a_file_that_is_no_database_is_refused_and_kept(tmp_path):
    path = tmp_path / "results.sqlite3"
    path.write_bytes(b"my thesis, not a database" * 100)
    refused(Records(path), "file is not a database")


def test_a_corrupt_database_is_refused_and_kept(records):
    data = bytearray(records.path.read_bytes())
    data[100:4096] = b"\xff" * 3996  # the schema's page behind the header
    records.path.write_bytes(data)
    refused(records, "malformed")


def test_a_newer_database_is_refused_and_kept(records):
    with sqlite3.connect(records.path) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    connection.close()
    refused(records, rf"version {SCHEMA + 1}, newer than this program's {SCHEMA}; update")


def test_another_programs_database_is_refused_and_kept(tmp_path):
    path = tmp_path / "results.sqlite3"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE photos (id INTEGER)")
    connection.close()
    refused(Records(path), "another program's")


def test_a_link_in_its_place_is_refused_and_its_target_kept(tmp_path, records):
    link = tmp_path / "results.sqlite3"
    link.symlink_to(records.path)
    refused(Records(link), "a link or a folder")


def test_a_dangling_link_in_its_place_makes_no_file(tmp_path):
    link = tmp_path / "results.sqlite3"
    link.symlink_to(tmp_path / "elsewhere")
    refused(Records(link), "a link or a folder")
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_in_its_place_is_refused(tmp_path):
    (tmp_path / "results.sqlite3").mkdir()
    refused(Records(tmp_path / "results.sqlite3"), "a link or a folder")


def test_a_file_in_the_place_of_the_data_folder_is_refused(tmp_path):
    (tmp_path / "data").touch()
    with pytest.raises(InputError, match="cannot be used"):
        Records(tmp_path / "data" / "results.sqlite3").begin("r", "w", {}, {})


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from calc.errors import InputError
from calc.measurements.records import Measured, Records
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = Records(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (store.path.stat().st_size + 8192,) * 2)
saved = 0
try:
    for number in range(10_000):
        store.add("run-1", Measured("c" * 500, str(number), 1, 1, "bytes"))
        saved += 1
except InputError as error:
    print(saved, error)
"""


def test_a_full_disk_is_one_message_and_loses_no_saved_row(records):
    done = subprocess.run([sys.executable, "-c", FULL_DISK, records.path], capture_output=True, text=True, check=True)
    saved, message = done.stdout.split(maxsplit=1)
    assert "cannot be used" in message
    assert [row["quantity"] for row in records.rows()] == [str(number) for number in range(int(saved))]
    assert int(saved) > 0
    records.add("run-1", ROW)  # the limit was the other process's: the store still works


def test_many_writers_at_once_lose_nothing(tmp_path):
    store = Records(tmp_path / "results.sqlite3")

    def write(number):
        store.begin(f"run-{number}", "w", {}, {})
        for _ in range(5):
            store.add(f"run-{number}", ROW)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert len(store.rows()) == 40
    assert len(store.runs()) == 8


def test_the_place_of_the_data_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("PLUMBLINE_DATA", str(tmp_path / "mine"))
    assert data_directory() == tmp_path / "mine"
    assert Records().path == tmp_path / "mine" / "results.sqlite3"
    monkeypatch.delenv("PLUMBLINE_DATA")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert data_directory() == tmp_path / "plumbline"


def test_the_file_is_the_users_own(records):
    assert records.path.stat().st_mode & 0o077 == 0


KILLED = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size = 1")  # what does not fit goes into the file before it is committed
connection.execute("BEGIN IMMEDIATE")
if sys.argv[2] == "new":
    connection.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, environment)")
    connection.executemany("INSERT INTO rows (environment) VALUES (?)", [("x" * 5000,)] * 50)
else:
    connection.execute("UPDATE runs SET environment = ?, outcome = 'half'", ('{"a": "' + "x" * 50_000 + '"}',))
    connection.execute("DELETE FROM rows")
    connection.executemany(
        "INSERT INTO runs (id, workload, started, options, environment) VALUES (?, 'w', '', '{}', ?)",
        [(str(at), "x" * 5000) for at in range(50)],
    )
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_while_writing(path, what="more"):
    """A writer that dies with half its changes in the file, and how it was in the journal next to it."""
    subprocess.run([sys.executable, "-c", KILLED, path, what], check=False)
    journal = path.with_name(path.name + "-journal")
    assert journal.stat().st_size > 512
    return journal


def test_what_a_killed_writer_left_half_done_is_rolled_back_by_the_next_reader(records):
    records.add("run-1", ROW)
    before = records.rows()
    journal = killed_while_writing(records.path)
    assert records.rows() == before
    assert [(run.id, run.outcome) for run in records.runs()] == [("run-1", "")]
    assert not journal.exists()


def test_a_writer_killed_while_it_makes_the_file_leaves_an_empty_store(tmp_path):
    store = Records(tmp_path / "results.sqlite3")
    killed_while_writing(store.path, "new")
    assert store.rows() == []
    store.begin("run-1", "w", {}, {})
    assert [run.id for run in store.runs()] == ["run-1"]


def test_no_complaint_says_to_move_or_delete_what_may_hold_rows(records, monkeypatch):
    for name in ("SQLITE_FULL", "SQLITE_BUSY", "SQLITE_READONLY_ROLLBACK", "SQLITE_CANTOPEN", "SQLITE_CORRUPT"):
        error = sqlite3.OperationalError(name)
        error.sqlite_errorcode = getattr(sqlite3, name)

        def failing(*_, error=error, **__):
            raise error

        monkeypatch.setattr(sqlite3, "connect", failing)
        with pytest.raises(InputError, match=r"full|SQLITE") as caught:
            records.rows()
        message = str(caught.value).partition(str(records.path))[2]
        assert not {"move", "delete", "remove"} & set(message.split())
        assert "kept" in message or "keep it" in message
        assert "PLUMBLINE_DATA" in message
