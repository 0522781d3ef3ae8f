"""Public reports of what people ran, and the right answers: each as its own files, through the command line.

`public_reports.json` has the files and the source of each. An expected pair is a value and the part by which it may differ, where
the source states a log's or a file's size and not the tensors' own. A weight map is cut to one tensor a shard.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calc.cli import run
from calc.errors import InputError

ROWS = json.loads((Path(__file__).parent / "public_reports.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_a_public_report_has_its_right_answer(row, tmp_path, monkeypatch):
    for name, content in row["files"].items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    expected = dict(row["expected"])
    if error := expected.pop("error", ""):
        with pytest.raises(InputError, match=error):
            run(row["command"])
        return
    answer = json.loads(run([*row["command"], "--format", "json"]))
    notes = " ".join(answer["notes"])
    assert expected.pop("note", "") in notes
    if (absent := expected.pop("no_note", "")) and absent in notes:
        pytest.fail(f"{absent!r} in {notes}")
    if expected.pop("architecture", ""):
        counted = json.loads(run(["params", row["command"][1], "--format", "json"]))
        assert counted["total"] == expected.pop("parameters")
    for key, value in expected.items():
        if isinstance(value, list):
            assert answer[key] == pytest.approx(value[0], rel=value[1]), key
        elif key == "format":
            assert answer[key].startswith(value)
        else:
            assert answer[key] == value, key
