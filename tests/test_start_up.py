"""What importing and starting load: nothing heavy, and no torch in the process that serves the pages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = (
    "torch",
    "triton",
    "transformers",
    "streamlit",
    "pandas",
    "plotly",
    "huggingface_hub",
    "gguf",
    "peft",
    "bitsandbytes",
)

# prints, as the last line of its output, which heavy packages a piece of code has loaded
_PROBE = "\nimport json, sys; print(json.dumps([name for name in {heavy!r} if name in sys.modules]))"


def run_python(code: str) -> tuple[list[str], str]:
    """Runs code in a fresh process: the heavy packages it loaded, and whatever else it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code + _PROBE.format(heavy=HEAVY)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *printed, last = done.stdout.splitlines()
    return json.loads(last), "\n".join([*printed, done.stderr]).strip()


def test_importing_calc_runs_nothing_and_loads_nothing_heavy():
    loaded, printed = run_python("import calc, calc.__main__")
    assert loaded == []
    assert printed == ""


@pytest.mark.torch
def test_importing_measure_runs_nothing_and_never_loads_the_web():
    loaded, printed = run_python("import measure, measure.__main__")
    assert printed == ""
    assert not {"streamlit", "pandas", "plotly"} & set(loaded)


@pytest.mark.parametrize("command", ["params llama-2-7b --format json", "gpus", "models"])
def test_the_command_line_answers_without_torch_or_the_web(command):
    code = (
        "import contextlib, io, runpy, sys\n"
        f"sys.argv = ['calc', *{command.split()!r}]\n"
        "out = io.StringIO()\n"
        "with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):\n"
        "    runpy.run_module('calc', run_name='__main__')\n"
        "assert out.getvalue().strip(), 'no answer'"
    )
    loaded, printed = run_python(code)
    assert loaded == []
    assert printed == ""


def test_the_web_process_never_loads_torch():
    pages = sorted(path.stem for path in (ROOT / "pages").glob("*.py") if path.stem != "__init__")
    assert pages
    loaded, _ = run_python("import app, importlib\n" + "\n".join(f"import pages.{page}" for page in pages))
    assert not {"torch", "triton", "transformers", "peft"} & set(loaded)


def test_a_test_file_that_imports_torch_is_not_of_the_fast_tier():
    """A line at the top costs every worker seconds; `pytestmark` keeps the file from being imported there."""
    loads = re.compile(
        r"^(import|from) (torch|transformers|peft|triton|bitsandbytes)\b|^\w+ = pytest.importorskip", re.M
    )
    marked = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.torch", re.M)
    files = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    wrong = [path.name for path, text in files.items() if loads.search(text) and not marked.search(text)]
    assert wrong == []
