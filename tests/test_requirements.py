"""What is installed: pinned in one place, enough for the pages, and set up to listen on this machine alone."""

from __future__ import annotations

import re
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from tests.requirements import requirements
from tests.test_layout import ROOT, imports_of, package_of, python_files


def pinned(*extras: str) -> list[str]:
    return [line for line in requirements(extras).splitlines() if line and not line.startswith("#")]


def test_requirements_are_those_of_the_project_pinned_without_local_versions():
    assert (ROOT / "requirements.txt").read_text(encoding="utf-8") == requirements()
    for line in pinned():
        assert re.fullmatch(r"[A-Za-z0-9_-]+==[0-9][0-9.]*(; .+)?", line), line
    assert "torch==2.13.0" in pinned()
    assert "triton==3.7.1; sys_platform == 'linux'" in pinned()


def test_what_is_installed_is_what_is_pinned():
    """Recordings are refused by the pinned versions (tests/recorded)."""
    for line in pinned():
        name, pin = re.match(r"([A-Za-z0-9_-]+)==([0-9.]+)", line).groups()
        with suppress(PackageNotFoundError):  # what is not installed does nothing
            assert version(name).partition("+")[0] == pin, name


def test_what_the_pages_need_is_their_extra_which_make_run_installs_first():
    names = {line.partition("==")[0] for line in pinned("pages")}
    needed = {
        found.package
        for path in python_files()
        if package_of(path.relative_to(ROOT).as_posix()) not in ("kernels", "measure")
        for found in imports_of(path.read_text(encoding="utf-8"), str(path))
    }
    packages = {"calc", "pages", "app"}
    needed = {{"yaml": "PyYAML"}.get(name, name) for name in needed}  # the one package whose module has another name
    assert needed - sys.stdlib_module_names - packages <= names
    assert not names & {"torch", "triton", "transformers", "peft"}


def test_the_app_listens_here_only_and_tells_nobody():
    config = tomllib.loads((ROOT / ".streamlit" / "config.toml").read_text(encoding="utf-8"))
    assert config["server"]["address"] == "localhost"
    assert config["server"]["port"] == 8501
    assert config["server"]["maxUploadSize"] <= 5
    assert config["browser"]["gatherUsageStats"] is False
    assert set(config["theme"]["light"]) == set(config["theme"]["dark"])
