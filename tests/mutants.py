"""`make mutants`: does a test notice when one line is wrong? Single-line mutations of calc, measure and pages, drawn by a seed.

Each mutant is a copy of the repository with one line changed, against the tests of its module: those that import it, those named
after it, and where there are neither those of its folder. `python -m tests.mutants --count 300 --seed 1 --seconds 120`.
"""

from __future__ import annotations

import argparse
import ast
import csv
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGES = ("calc", "measure", "pages")
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.csv")  # path, line, mutated, reason
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "*.sqlite3")
_MOST_FILES = 12  # of tests for one mutant, the nearest first
# what stands between two operands, and what replaces it
_OPERATORS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
_NOTICED = ("killed", "out of time")
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Mutant(NamedTuple):
    """One line of one file, and what it becomes."""

    path: str
    number: int
    line: str
    mutated: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.path, self.line.strip(), self.mutated.strip()


def mutants_of(path: str, text: str) -> Iterator[Mutant]:
    """Every mutation of a file, one each; text, types and what is only shown are left as they are."""
    lines = text.splitlines()
    tree = ast.parse(text)
    passed_over = {id(inner) for node in ast.walk(tree) for inner in _not_code(node)}
    for node in ast.walk(tree):
        if id(node) in passed_over:
            continue
        for number, begin, end, new in _changes(node, lines):
            line = lines[number - 1]
            mutated = line[:begin] + new + line[end:]
            if mutated != line:
                yield Mutant(path, number, line, mutated)


def _not_code(node: ast.AST) -> Iterator[ast.AST]:
    """Types, decorators and texts below a node."""
    parts: list[ast.AST | None] = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        given = (*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs)
        parts = [node.returns, *node.decorator_list, *(one.annotation for one in given)]
    elif isinstance(node, ast.ClassDef):
        parts = [*node.decorator_list]
    elif isinstance(node, ast.AnnAssign):
        parts = [node.annotation]
    elif isinstance(node, ast.JoinedStr):
        parts = [*node.values]
    for part in parts:
        if part is not None:
            yield from ast.walk(part)


Change = tuple[int, int, int, str]  # line, first column, column after the last, new text


def _changes(node: ast.AST, lines: Sequence[str]) -> Iterator[Change]:
    """The mutations of a node, where what changes stands on one line."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        if node.lineno == node.end_lineno:
            yield _replaced(node, lines, _other(node.value))
    elif isinstance(node, ast.Compare):
        yield from _swapped([node.left, *node.comparators], node.ops, lines)
    elif isinstance(node, ast.BinOp):
        yield from _swapped([node.left, node.right], [node.op], lines)
    elif isinstance(node, ast.BoolOp):
        yield from _swapped(node.values, [node.op] * len(node.values), lines)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _NAMES:
        yield _replaced(node.func, lines, _NAMES[node.func.id])
    elif isinstance(node, ast.If | ast.IfExp) and node.test.lineno == node.test.end_lineno:
        number, begin, end, _ = _replaced(node.test, lines, "")
        yield number, begin, end, f"not ({lines[number - 1][begin:end]})"


def _other(value: object) -> str:
    if isinstance(value, bool):
        return str(not value)
    return f"({value!r} + 1)" if isinstance(value, int) else f"({value!r} * 1.25 + 0.125)"


def _replaced(node: ast.expr, lines: Sequence[str], new: str) -> Change:
    number = node.lineno
    return number, _column(lines, number, node.col_offset), _column(lines, number, node.end_col_offset), new


def _swapped(sides: Sequence[ast.expr], operators: Sequence[ast.AST], lines: Sequence[str]) -> Iterator[Change]:
    """Each operator between two sides on one line, as its opposite."""
    for left, operator, right in zip(sides, operators, sides[1:], strict=False):
        old, new = _OPERATORS.get(type(operator), ("", ""))
        if old and left.end_lineno == right.lineno:
            begin = _column(lines, right.lineno, left.end_col_offset)
            at = lines[right.lineno - 1].find(old, begin, _column(lines, right.lineno, right.col_offset))
            if at >= 0:
                yield right.lineno, at, at + len(old), new


def _column(lines: Sequence[str], number: int, offset: int | None) -> int:
    """The column in characters of an offset in bytes, as ast has it."""
    return len(lines[number - 1].encode()[:offset].decode())


def tests_of(path: str, tests: dict[str, str]) -> tuple[str, ...]:
    """The test files of a module: named after it, importing it, or next to where its own would be."""
    module, name, folder = path[:-3].replace("/", "."), Path(path).stem, str(Path("tests", path).parent)
    parent, _, last = module.rpartition(".")
    imports = re.compile(
        rf"^(?:from {re.escape(module)} import |import {re.escape(module)}\b|from {re.escape(parent)} import .*\b{re.escape(last)}\b)",
        re.M,
    )
    named = [
        test
        for test in tests
        if test.startswith(f"{folder}/test_{name}") or (name == "__init__" and test.startswith(folder))
    ]
    importing = [test for test, text in tests.items() if imports.search(text)]
    near = [test for test in tests if str(Path(test).parent) == folder]
    above = [test for test in tests if test.startswith(f"{Path(folder).parent}/")]
    return tuple(dict.fromkeys([*named, *importing]) or near or above)[:_MOST_FILES]


def run(copy: Path, tests: tuple[str, ...], seconds: float, more: tuple[str, ...] = ()) -> str:
    """ "survived", "killed", "out of time" or "no test": what the tests say in the copy. What they started ends with them."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", *more, *tests]
    process = subprocess.Popen(
        command, cwd=copy, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)},
    )  # fmt: skip
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return "out of time"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return {0: "survived", 5: "no test"}.get(code, "killed")


def main() -> int:
    given = _flags()
    tests = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    files = [str(path.relative_to(ROOT)) for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
    every = [
        one for file in files if file.startswith(given.only) for one in mutants_of(file, (ROOT / file).read_text())
    ]
    drawn = random.Random(given.seed).sample(every, min(given.count, len(every)))
    print(f"{len(drawn)} of {len(every):,} mutants, seed {given.seed}, {given.seconds:g} s each", flush=True)
    counts: Counter[str] = Counter()
    for mutant, outcome in _outcomes(drawn, tests, given):
        counts[outcome] += 1
        if outcome not in (*_NOTICED, "not reached"):
            line, mutated = mutant.key[1:]
            print(f"{outcome}: {mutant.path}:{mutant.number}\n  - {line}\n  + {mutated}", flush=True)
    noticed = sum(counts[name] for name in _NOTICED)
    judged = noticed + counts["survived"] + counts["no test"]
    print(f"{dict(counts)}; noticed: {noticed} of {judged} ({noticed / max(judged, 1):.1%}) that are not equivalent")
    return 0


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Single-line mutations against the tests of their modules.")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", default="1")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="for the tests of one mutant; one that hangs is noticed"
    )
    parser.add_argument(
        "--within", type=float, default=float("inf"), help="seconds for all; those not reached are counted"
    )
    parser.add_argument("--fast", action="store_true", help="only tests without torch and browser")
    parser.add_argument("--only", default="", help="files whose path begins so")
    return parser.parse_args()


def _outcomes(
    drawn: Sequence[Mutant], tests: dict[str, str], given: argparse.Namespace
) -> Iterator[tuple[Mutant, str]]:
    """What became of each mutant, in one copy of the repository. Tests that fail without any mutation judge nothing."""
    with EQUIVALENT.open(newline="") as file:
        equivalent = {(row["path"], row["line"], row["mutated"]) for row in csv.DictReader(file)}
    end, more = time.monotonic() + given.within, ("--fast",) if given.fast else ()
    sound: dict[tuple[str, ...], str] = {}
    with TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=_LEFT_OUT)
        for mutant in drawn:
            chosen = tests_of(mutant.path, tests)
            if time.monotonic() > end:
                yield mutant, "not reached"
            elif not chosen:
                yield mutant, "no test"
            elif mutant.key in equivalent:
                yield mutant, "equivalent"
            else:
                if chosen not in sound:
                    sound[chosen] = run(copy, chosen, 4 * given.seconds, more)
                whole = sound[chosen]
                yield (
                    mutant,
                    _tried(copy, mutant, chosen, given.seconds, more) if whole == "survived" else f"unmutated {whole}",
                )


def _tried(copy: Path, mutant: Mutant, tests: tuple[str, ...], seconds: float, more: tuple[str, ...]) -> str:
    file = copy / mutant.path
    lines = file.read_text().splitlines(keepends=True)
    original = "".join(lines)
    lines[mutant.number - 1] = lines[mutant.number - 1].replace(mutant.line, mutant.mutated, 1)
    file.write_text("".join(lines))
    try:
        return run(copy, tests, seconds, more)
    finally:
        file.write_text(original)


if __name__ == "__main__":
    sys.exit(main())
