"""Command lines and config files of public repositories: each setting is read as stated here, or named as not understood.

`external_runs.json` holds the settings of each file (comments left out), where it was found, and what each setting is here: printed by
the readers and then read through against the text. A count that the readers have no part in holds that no setting is dropped.
`gpus` is what the file's own comment states, where it states it.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from calc.external_formats.formats import TOOLS, read

ROWS = json.loads((Path(__file__).parent / "external_runs.json").read_text(encoding="utf-8"))
NO_EFFECT = (": no effect here", ": left empty")


@pytest.mark.parametrize("row", ROWS, ids=[f"{count}-{row['tool']}" for count, row in enumerate(ROWS)])
def test_a_published_run_is_read_as_stated(row):
    found = read(row["text"], gpus=row.get("gpus"))
    assert found.tool == row["tool"]
    assert found.model == row["model"]
    assert found.given == row["plan"]
    assert [one for one in found.understood if not one.endswith(NO_EFFECT)] == row["understood"]
    assert [re.split(r"[ :]", one)[0] for one in found.understood if one.endswith(NO_EFFECT)] == row["without_effect"]
    assert list(found.not_understood) == row["not_understood"]


def leaves(data: Any) -> int:
    """Settings of a config file: what is no table of its own."""
    return sum(leaves(value) for value in data.values()) if isinstance(data, dict) and data else 1


def settings_of(text: str) -> int | None:
    """Settings of a text, counted without the product; None for a script whose variables hold settings."""
    if text.startswith("{"):
        return leaves(json.loads(text))
    if text.startswith("["):
        return leaves(tomllib.loads(text))
    first = text.split(maxsplit=1)[0]
    if first.endswith(":"):
        return leaves(yaml.safe_load(text))
    command = re.sub(r"python3? -m |set -x", "", text)
    return None if "=" in text.splitlines()[0] else len(re.findall(r"(?<!\S)--?[A-Za-z]", command))


@pytest.mark.parametrize("row", ROWS, ids=[f"{count}-{row['tool']}" for count, row in enumerate(ROWS)])
def test_no_setting_of_a_published_run_is_dropped(row):
    settings = settings_of(row["text"])
    if settings is None:
        pytest.skip("a script: its settings lie in variables")
    named = len(row["understood"]) + len(row["without_effect"]) + len(row["not_understood"])
    assert named >= settings


def test_every_tool_has_published_runs():
    counts = {tool: sum(row["tool"] == tool for row in ROWS) for tool in TOOLS}
    assert min(counts.values()) >= 3
    assert len(ROWS) >= 60
    assert all(re.match(r"github [\w.-]+/[\w.-]+@[0-9a-f]{10}:\S+$", row["source"]) for row in ROWS)
