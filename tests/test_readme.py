"""README.md is short, and what it says to type does what it says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from urllib.parse import parse_qs, urlsplit

import pytest

import calc.cli
import measure.cli
from calc.catalogue import load
from calc.child_environment import child_environment
from calc.commands import COMMANDS
from calc.hardware import gpu
from calc.training import train
from measure.workloads import SUITES, WORKLOADS
from tests.docs import PAGES, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
ASKED = [line for line in LINES if line.split()[0] == "plumbline"]
QUESTIONS = [line for line in ASKED if line.split()[1] in {*COMMANDS, "from"}]


def test_the_readme_is_at_most_120_lines():
    assert len(README.splitlines()) <= 120


def test_every_line_to_type_is_tried_here():
    others = [line for line in LINES if line not in ASKED]
    assert QUESTIONS
    assert {line.split()[1] for line in ASKED if line not in QUESTIONS} <= {"trace", "measure"}
    assert {line.split()[0] for line in others} == {"make", "pipx"}


@pytest.mark.parametrize("line", QUESTIONS)
def test_a_question_is_answered(line):
    assert calc.cli.run(shlex.split(line)[1:])


@pytest.mark.torch
def test_a_step_is_traced():
    model, script = (line for line in ASKED if line.split()[1] == "trace")
    assert "traced" in measure.cli.run(shlex.split(model)[1:])
    assert "it fits" in measure.cli.run(shlex.split(script)[1:])


@pytest.mark.torch
def test_a_workload_is_measured(tmp_path):
    (line,) = (line for line in ASKED if line.split()[1] == "measure")
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(line)[1:]],
        env=child_environment({"PLUMBLINE_DATA": str(tmp_path)}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "parameters" in done.stdout


def test_workloads_that_are_named_exist():
    assert set(re.findall(r"plumbline measure run ([\w-]+)", README)) <= {*WORKLOADS, *SUITES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_make_is_told_to_make_is_a_target(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets


def test_extras_that_pipx_installs_exist():
    """That the wheel installs and answers: tests/test_packaging.py."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for line in LINES:
        if line.startswith("pipx"):
            assert set(re.search(r"'\.\[([\w,]+)\]'", line)[1].split(",")) <= set(extras)


def test_the_link_asks_the_question_of_the_command_and_of_the_lines_of_python():
    from pages.ui.link import read

    (address,) = re.findall(r"<(http://localhost:8501/training[^>]+)>", README)
    plan = COMMANDS["train"].plan
    found = read(parse_qs(urlsplit(address).query, keep_blank_values=True), [plan])
    assert found.complaints == []
    scenario = found.scenario
    answer = train(load(scenario.subject.model), scenario.of(plan), gpu(scenario.subject.gpu))
    assert f"(True, {answer.driver_bytes})" in README
    assert f"({answer.driver_bytes:,})" in README
