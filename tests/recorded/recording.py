"""Results of slow deterministic programs, kept in the repository so that a test compares with them in no time.

An entry is a line of JSON: its key, the program it is an example of, `made_by`, and the result. `made_by` is a fingerprint of all
that made the result: the code of the program (its syntax tree without docstrings; never `calc`, which is what is tested), its
inputs, and the pinned versions of its packages. An entry whose fingerprint is no longer that of today is refused; what is not recorded
yet is run, save in the fast tier, which has nothing to run it with.

`--recorded` says what a run does: `read` compares with the recording alone; `sample` also runs some programs again, others each day
(`--seed`), and one of each kind; `all` runs every one again; `write` (`make record`) runs what is missing or stale, and keeps it.
"""

from __future__ import annotations

import ast
import datetime
import fcntl
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
MODES = ("read", "sample", "all", "write")
OWN = ("measure", "kernels", "tests")  # packages whose code makes results

settings: dict[str, Any] = {"recorded": "read", "seed": datetime.date.today().isoformat(), "fast": False}


class Recording:
    """One file of results. `code` names the modules that make them, `packages` what they are made with, `again` how many a
    sample runs again, and one of each program."""

    def __init__(self, name: str, code: tuple[str, ...], packages: tuple[str, ...], again: int = 3) -> None:
        self.path, self.code, self.packages, self.again = FOLDER / f"{name}.jsonl", code, packages, again

    def result(
        self, key: str, inputs: object, make: Callable[[], Any], program: str = "", packages: tuple[str, ...] = ()
    ) -> Any:
        """What `make` gives, in JSON's types: as recorded, or run again where this run does so (then both must be the same)."""
        made_by = fingerprint(self.code, (*self.packages, *packages), inputs)
        entry = self.entries.get(key)
        if settings["recorded"] == "write":
            if entry is None or entry["made_by"] != made_by:  # another process may have made it since
                entry = {each["key"]: each for each in _lines(self.path)}.get(key)
            if entry is None or entry["made_by"] != made_by:
                entry = {"key": key, "program": program, "made_by": made_by, "result": _plain(make())}
                self._keep(entry)
            return entry["result"]
        if entry is None and not settings["fast"]:
            return _plain(make())
        if entry is None or entry["made_by"] != made_by:
            fault = "holds nothing of" if entry is None else "was made by other code, inputs or versions for"
            pytest.fail(f"tests/recorded/{self.path.name} {fault} '{key}': run `make record`", pytrace=False)
        if settings["recorded"] == "all" or (settings["recorded"] == "sample" and key in self.sampled):
            found = _plain(make())
            assert found == entry["result"], f"{self.path.name}: '{key}' run again differs from its recording"
        return entry["result"]

    @cached_property
    def entries(self) -> dict[str, Any]:
        """Entries by key."""
        return {entry["key"]: entry for entry in _lines(self.path)}

    @cached_property
    def sampled(self) -> set[str]:
        """Keys that a sample runs again: the same in every process of a run."""
        order = shuffled(self.entries)
        one_of_each = {self.entries[key]["program"]: key for key in reversed(order)}
        return {*order[: self.again], *one_of_each.values()}

    def _keep(self, entry: dict[str, Any]) -> None:
        """Written at once, so that a run that is broken off resumes; several processes may write."""
        with (FOLDER / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept = {each["key"]: each for each in _lines(self.path)} | {entry["key"]: entry}
            text = "".join(json.dumps(kept[key], separators=(",", ":")) + "\n" for key in sorted(kept))
            part = self.path.with_suffix(".part")
            part.write_text(text)
            part.replace(self.path)


def shuffled(keys: Iterable[str]) -> list[str]:
    """The keys in the order of this run's seed: the first ones are its sample."""
    return sorted(keys, key=lambda key: _digest(settings["seed"] + key))


def drawn(values: Iterable[Any], count: int) -> list[Any]:
    """So many of the values in the fast tier and in `make test`, others each day; all of them elsewhere and in `make test-all`."""
    named = {str(value): value for value in values}
    few = settings["fast"] or settings["recorded"] == "sample"
    return [named[name] for name in shuffled(named)[: count if few else None]]


def fingerprint(code: tuple[str, ...], packages: tuple[str, ...], inputs: object) -> str:
    """Of a program's code, the pinned versions of its packages, and its inputs (JSON)."""
    versions = {name: _pins()[name] for name in packages}
    return _digest(json.dumps([_code_digest(code), versions, inputs], sort_keys=True))[:16]


@cache
def _pins() -> Mapping[str, str]:
    """Versions as requirements.txt pins them; a test holds that they are those installed."""
    return dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))


@cache
def _code_digest(modules: tuple[str, ...]) -> str:
    """Of these modules and of all of ours that they import, wherever in the code they do."""
    seen: dict[str, str] = {}
    found = list(modules)
    while found:
        name = found.pop()
        path = _file_of(name)
        if name in seen or path is None:
            continue
        tree = ast.parse(path.read_text())
        seen[name] = _digest(repr(_shape(tree)))
        found += _imports(tree)
    return _digest(repr(sorted(seen.items())))


def _file_of(module: str) -> Path | None:
    if module.partition(".")[0] not in OWN or module == __name__:
        return None
    path = ROOT.joinpath(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _shape(node: object) -> object:
    """A syntax tree as tuples, the same in every version of Python: no docstrings, no places, no empty fields."""
    if isinstance(node, list):
        return [_shape(each) for each in node if not _is_text(each)]
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
        return (type(node).__name__, *((name, _shape(value)) for name, value in fields))
    return node


def _is_text(node: object) -> bool:
    """A docstring, or another statement that is only a text."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _plain(found: Any) -> Any:
    return json.loads(json.dumps(found))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
