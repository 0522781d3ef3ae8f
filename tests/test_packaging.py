"""The wheel has all that the installed command needs: it is built, installed into an environment of its own, and asked."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path

import pytest

from calc.version import VERSION
from tests.pages.ports import free_port, until_healthy

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]  # one wheel for all tests


def ran(*command: object, **options: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that has the wheel, and its dependencies from this one."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("calc", "kernels", "measure", "pages", ".streamlit"):
        shutil.copytree(ROOT / name, folder / "tree" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("app.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "tree")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    ran(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, folder / "tree")
    environment = folder / "environment"
    ran(sys.executable, "-m", "venv", "--without-pip", environment)
    (wheel,) = folder.glob("*.whl")
    ran(*pip, "--python", environment / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return environment / "bin"


def test_the_command_answers_every_question_from_the_wheels_own_data(installed, tmp_path):
    plumbline = installed / "plumbline"
    where = ran(installed / "python", "-c", "import calc; print(calc.__file__)", cwd=tmp_path)
    assert where.startswith(str(installed.parent))
    assert ran(plumbline, "--version", cwd=tmp_path) == f"plumbline {VERSION}\n"
    answer = json.loads(
        ran(plumbline, "train", "llama-2-7b", "--gpu", "h100-sxm-80gb", "--format", "json", cwd=tmp_path)
    )
    assert answer["version"] == VERSION
    assert answer["parameters_bytes"] == 13_476_831_232
    assert len(json.loads(ran(plumbline, "models", "--format", "json", cwd=tmp_path))) > 100
    assert "--micro-batch" in ran(plumbline, "trace", "--help", cwd=tmp_path)
    assert "decoder-states" in ran(plumbline, "measure", "list", cwd=tmp_path)
    for name in ("params", "trace", "measure", "app"):
        assert f"\n  {name} " in ran(plumbline, "--help", cwd=tmp_path)


def test_every_file_of_data_is_in_the_wheel(installed):
    (site,) = installed.parent.glob("lib/python*/site-packages")
    for package in ("calc", "pages"):
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                assert (site / path.relative_to(ROOT)).read_bytes() == path.read_bytes(), path


def test_the_command_serves_the_pages_from_any_folder_with_the_apps_settings(installed, tmp_path):
    port = free_port()
    command = [installed / "plumbline", "app", "--server.port", str(port)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
        try:
            until_healthy(f"http://localhost:{port}", process)
            with urllib.request.urlopen(f"http://localhost:{port}/", timeout=10) as page:
                assert "<title>" in page.read().decode()
            text = (tmp_path / "log").read_text()
        finally:
            process.terminate()
            process.wait(10)
    assert "Traceback" not in text
    assert f"http://localhost:{port}" in text  # server.address, one of the settings
