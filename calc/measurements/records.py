"""The store of measured results: one SQLite file that measure writes, row by row, and pages read.

A row is safe once `Records.add` returns: SQLite's journal survives a killed process and a lost power supply.
"""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from calc.breakdown import Number, to_csv
from calc.errors import InputError

COLUMNS: Final = (
    "workload",
    "case",
    "quantity",
    "predicted",
    "measured",
    "relative_error",
    "unit",
    "p20",
    "p80",
    "environment",
)
SCHEMA: Final = 1  # PRAGMA user_version of the files that this program writes
APPLICATION: Final = 0x504C4D42  # PRAGMA application_id, "PLMB": tells our files from other programs'
LARGEST_LIST: Final = 10_000  # rows, or runs, that one call gives at most
_WAIT_SECONDS: Final = 10.0  # for another process's write to end
_FILE: Final = "results.sqlite3"
# numbers have no declared type: SQLite then keeps an exact integer an integer
_TABLES: Final = (
    "CREATE TABLE runs (id TEXT PRIMARY KEY, workload TEXT NOT NULL, started TEXT NOT NULL, options TEXT NOT NULL,"
    " environment TEXT NOT NULL, outcome TEXT NOT NULL DEFAULT '', message TEXT NOT NULL DEFAULT '')",
    'CREATE TABLE rows (id INTEGER PRIMARY KEY, run TEXT NOT NULL REFERENCES runs(id), "case" TEXT NOT NULL,'
    " quantity TEXT NOT NULL, predicted, measured, unit TEXT NOT NULL, p20, p80)",
    "CREATE INDEX rows_by_run ON rows(run)",
)
_ADD: Final = (
    'INSERT INTO rows (run, "case", quantity, predicted, measured, unit, p20, p80) VALUES (?, ?, ?, ?, ?, ?, ?, ?)'
)


class Measured(NamedTuple):
    """One measured quantity against its prediction. `case` tells apart what one workload measures several times ("small, fp32");
    `quantity` is a breakdown's path or a name. Bytes are exact integers; counts have no spread, so p20 and p80 are None."""

    case: str
    quantity: str
    predicted: Number | None
    measured: Number | None
    unit: str
    p20: Number | None = None
    p80: Number | None = None

    @property
    def relative_error(self) -> float | None:
        """(measured - predicted) / measured, as `calc.breakdown.compare` has it; None when a side is missing or nothing was measured."""
        if self.predicted is None or not self.measured:
            return None
        return (self.measured - self.predicted) / self.measured

    def as_json(self, workload: str, environment: Mapping[str, Any]) -> dict[str, Any]:
        """The row with the keys of `python -m measure results`."""
        values = {**self._asdict(), "relative_error": self.relative_error}
        return {"workload": workload, "environment": dict(environment)} | values


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `outcome` is "finished", "cancelled", "timed out", "out of memory", "refused", "failed", "imported", or "" while it
    runs (or when it was killed with everything around it); `started` is UTC, ISO 8601."""

    id: str
    workload: str
    started: str
    options: Mapping[str, Any]
    environment: Mapping[str, Any]
    outcome: str
    message: str


def data_directory() -> Path:
    """Where results and locks live: PLUMBLINE_DATA, or the platform's place for a user's data. It may not exist yet."""
    chosen = os.environ.get("PLUMBLINE_DATA")
    if chosen:
        try:
            return Path(chosen).expanduser()
        except RuntimeError:
            raise InputError.of("PLUMBLINE_DATA", chosen, "there is no such user") from None
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "plumbline"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home()) / "plumbline"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "plumbline"


def make_data_directory() -> Path:
    """`data_directory()`, made when missing. InputError when it cannot be."""
    path = data_directory()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError.of(
            "PLUMBLINE_DATA", str(path), f"it must be a folder that can be written ({error.strerror})"
        ) from None
    return path


class Records:
    """The store. Every call opens the file, checks that it is ours, and closes it: no handle to leak, none to go stale.

    InputError, with the file's path and what to do, when it is a link, not a database, another program's, of a newer version,
    or cannot be written (a full disk); nothing is overwritten.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or data_directory() / _FILE

    def begin(self, run: str, workload: str, options: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        """Note that a run has begun. The file is made when there is none."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        values = (run, workload, now, json.dumps(dict(options)), json.dumps(dict(environment)))
        with self._open(write=True) as connection:
            connection.execute(
                "INSERT INTO runs (id, workload, started, options, environment) VALUES (?, ?, ?, ?, ?)", values
            )

    def add(self, run: str, row: Measured) -> None:
        """Save one finished row; once this returns it survives the death of any process."""
        with self._open(write=True) as connection:
            connection.execute(_ADD, (run, *row))

    def end(self, run: str, outcome: str, message: str = "") -> None:
        """Note how a run ended."""
        with self._open(write=True) as connection:
            connection.execute("UPDATE runs SET outcome = ?, message = ? WHERE id = ?", (outcome, message, run))

    def take(self, runs: Sequence[tuple[Run, Sequence[Measured]]]) -> int:
        """Save whole runs, all or none of them; returns the number of rows. InputError when one of them is here already."""
        with self._open(write=True) as connection:
            for run, rows in runs:
                if connection.execute("SELECT 1 FROM runs WHERE id = ?", (run.id,)).fetchone():
                    raise InputError(f"results: the run of {run.workload} {run.message} is here already", "file")
                connection.execute(
                    "INSERT INTO runs (id, workload, started, options, environment, outcome, message) VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (
                        run.id,
                        run.workload,
                        run.started,
                        json.dumps(dict(run.options)),
                        json.dumps(dict(run.environment)),
                        run.outcome,
                        run.message,
                    ),
                )
                connection.executemany(_ADD, [(run.id, *row) for row in rows])
        return sum(len(rows) for _, rows in runs)

    def runs(self) -> list[Run]:
        """The newest LARGEST_LIST runs, newest first; none when there is no file yet."""
        query = (
            "SELECT id, workload, started, options, environment, outcome, message FROM runs "
            f"ORDER BY rowid DESC LIMIT {LARGEST_LIST}"
        )
        return [
            Run(run, workload, started, json.loads(options), json.loads(environment), outcome, message)
            for run, workload, started, options, environment, outcome, message in self._read(query, ())
        ]

    def rows(self, workload: str = "", run: str = "") -> list[dict[str, Any]]:
        """Saved rows as dicts with COLUMNS' keys and `run`, `started`, in the order saved, the newest LARGEST_LIST of them."""
        query = (
            'SELECT runs.workload, environment, runs.id, started, "case", quantity, predicted, measured, unit, p20, p80 '
            "FROM rows JOIN runs ON runs.id = rows.run WHERE ? IN ('', runs.workload) AND ? IN ('', runs.id) "
            f"ORDER BY rows.id DESC LIMIT {LARGEST_LIST}"
        )
        found = [
            Measured(*values).as_json(name, json.loads(environment)) | {"run": identity, "started": started}
            for name, environment, identity, started, *values in self._read(query, (workload, run))
        ]
        return found[::-1]

    def _read(self, query: str, values: Sequence[Any]) -> Sequence[tuple[Any, ...]]:
        if not os.path.lexists(self.path) or os.lstat(self.path).st_size == 0:  # none yet, or just being made
            return []
        with self._open(write=False) as connection:
            if _is_empty(connection):  # whoever was making it was killed, and what was begun is rolled back
                return []
            return connection.execute(query, values).fetchall()

    @contextmanager
    def _open(self, write: bool) -> Iterator[sqlite3.Connection]:
        """The database. Readers open it for writing too: only so can SQLite roll back what a killed writer left half done. A file that
        this account may only read is still read."""
        try:
            self._check_file(make=write)
            connection = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=rw", timeout=_WAIT_SECONDS, uri=True)
            try:
                with connection:  # commits, or rolls back on an error
                    self._check_version(connection, write)
                    yield connection
            finally:
                connection.close()
        except (sqlite3.Error, OSError) as error:
            code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF  # without what SQLite adds in the higher bits
            what, advice = _ADVICE.get(code, ("cannot be used ({})", ""))
            raise self._refusal(what.format(error), advice) from None

    def _check_file(self, make: bool) -> None:
        """A link could lead a write anywhere, so only a plain file will do; a missing one is made, never through a link."""
        if make and not os.path.lexists(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # another process made it in between
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        if not stat.S_ISREG(os.lstat(self.path).st_mode):
            raise self._refusal("is not a plain file (a link or a folder is in its place)")

    def _check_version(self, connection: sqlite3.Connection, write: bool) -> None:
        def ask(query: str) -> int:
            return int(connection.execute(query).fetchone()[0])

        if write:
            connection.execute(
                "BEGIN IMMEDIATE"
            )  # two processes may meet an empty file at once; one of them lays it out
        version, application = ask("PRAGMA user_version"), ask("PRAGMA application_id")
        if _is_empty(connection):  # just made
            if not write:
                return
            for statement in (*_TABLES, f"PRAGMA application_id = {APPLICATION}", f"PRAGMA user_version = {SCHEMA}"):
                connection.execute(statement)
        elif application != APPLICATION:
            raise self._refusal("is another program's database")
        elif version > SCHEMA:
            raise self._refusal(f"is of version {version}, newer than this program's {SCHEMA}; update the program")

    def _refusal(self, what: str, advice: str = "") -> InputError:
        """The complaint. It never says to move or delete anything: rows may be in the file, and in the journal next to it."""
        return InputError(
            f"results: {self.path} {what}; {advice or 'nothing was changed in it, keep it and any file next to it'}, or set "
            "PLUMBLINE_DATA to another folder",
            "results",
        )


_ADVICE: Final = {
    sqlite3.SQLITE_FULL: ("cannot grow: the disk is full", "what was saved before is kept; make room"),
    sqlite3.SQLITE_BUSY: ("is written by another program ({})", "what was saved is kept; try again in a moment"),
    sqlite3.SQLITE_READONLY: (
        "holds a write that was broken off, and may not be written here ({})",
        "what was saved is kept; open it once as an account that may write in its folder",
    ),
    sqlite3.SQLITE_CANTOPEN: (
        "cannot be opened ({})",
        "what was saved is kept; see to it that this account may write in its folder",
    ),
}


def _is_empty(connection: sqlite3.Connection) -> bool:
    """Whether nothing was ever laid out in it, by us or by another program."""
    asked = ("PRAGMA user_version", "PRAGMA application_id", "SELECT count(*) FROM sqlite_master")
    return not any(connection.execute(query).fetchone()[0] for query in asked)


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of `Records.rows` as CSV: the contract's columns, exact numbers, the environment as JSON."""
    flat = [{**row, "environment": json.dumps(row["environment"])} for row in rows]
    return to_csv(flat, (*COLUMNS, "run", "started"))


def as_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of `Records.rows` as a JSON list, exact numbers."""
    return json.dumps(list(rows), indent=1)
