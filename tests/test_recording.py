"""A recording is compared with, refused when stale, sampled, and written entry by entry."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from tests.recorded import recording
from tests.recorded.recording import Recording, settings, shuffled
from tests.recorded.traces import TRACES


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A recording of squares in a folder of its own, and how a run is told what to do."""
    monkeypatch.setattr(recording, "FOLDER", tmp_path)

    def mode(**changes: Any) -> Recording:
        for name, value in changes.items():
            monkeypatch.setitem(settings, name, value)
        return Recording("squares", ("tests.latex",), ("torch",), again=2)

    return mode


def square(kept: Recording, of: int, made: list[int], program: str = "") -> int:
    return kept.result(f"square of {of}", of, lambda: made.append(of) or of * of, program)


def test_what_was_written_is_read_and_not_made_again(kept):
    made: list[int] = []
    assert square(kept(recorded="write"), 3, made) == 9
    assert square(kept(recorded="write"), 3, made) == 9
    assert square(kept(recorded="read"), 3, made) == 9
    assert made == [3]


@pytest.mark.parametrize("mode", ["read", "sample", "all"])
def test_a_stale_entry_is_refused_in_one_line_that_says_what_to_run(mode, kept, monkeypatch):
    square(kept(recorded="write"), 3, [])
    monkeypatch.setattr(recording, "_pins", lambda: {"torch": "another"})
    with pytest.raises(
        pytest.fail.Exception, match=r"squares\.jsonl was made by .* 'square of 3': run `make record`"
    ) as caught:
        square(kept(recorded=mode), 3, [])
    assert "\n" not in str(caught.value)


def test_what_is_not_recorded_is_made_save_in_the_fast_tier(kept):
    made: list[int] = []
    assert square(kept(recorded="read", fast=False), 4, made) == 16
    with pytest.raises(pytest.fail.Exception, match="holds nothing of 'square of 4': run `make record`"):
        square(kept(recorded="read", fast=True), 4, made)
    assert made == [4]


def test_a_sample_makes_some_again_and_one_of_each_program_and_all_makes_every_one(kept):
    for of in range(20):
        square(kept(recorded="write"), of, [], "odd" if of == 7 else "even")
    made: list[int] = []
    for of in range(20):
        square(kept(recorded="sample", seed="a day"), of, made, "")
    assert 7 in made
    assert 2 <= len(made) <= 4
    others: list[int] = []
    for of in range(20):
        square(kept(recorded="sample", seed="another day"), of, others, "")
    assert made != others
    every: list[int] = []
    for of in range(20):
        square(kept(recorded="all"), of, every, "")
    assert every == list(range(20))


def test_a_program_that_gives_something_else_than_recorded_is_a_failure(kept):
    square(kept(recorded="write"), 3, [])
    with pytest.raises(AssertionError, match="run again differs"):
        kept(recorded="all").result("square of 3", 3, lambda: 10)


def shape(text: str) -> object:
    return recording._shape(ast.parse(text))


def test_words_about_the_code_leave_a_fingerprint_as_it_is_and_code_does_not():
    plain = shape("def f(x):\n    return x + 1\n")
    assert shape('def f(x):\n    """What it does."""\n    return (x + 1)  # why\n') == plain
    assert shape("def f(x):\n    return x + 2\n") != plain


def test_a_trace_is_made_by_the_tracing_code_and_never_by_the_formulas():
    files = set()
    found = list(TRACES.code)
    while found:
        name = found.pop()
        path = recording._file_of(name)
        if path and path not in files:
            files.add(path)
            found += recording._imports(ast.parse(path.read_text()))
    names = {path.relative_to(recording.ROOT).as_posix() for path in files}
    assert {"measure/trace/step.py", "measure/trace/recorder.py", "measure/trace/timeline.py"} < names
    assert not any(name.startswith("calc/") for name in names)


def test_a_seed_draws_the_same_sample_everywhere_and_another_seed_another(monkeypatch):
    names = [f"case {number}" for number in range(50)]
    monkeypatch.setitem(settings, "seed", "a day")
    drawn = shuffled(names)
    assert sorted(drawn) == sorted(names)
    assert shuffled(reversed(names)) == drawn
    monkeypatch.setitem(settings, "seed", "the next")
    assert shuffled(names)[:5] != drawn[:5]
