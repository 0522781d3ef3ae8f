"""Which tier of tests runs, and what recordings are for in it."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.recorded.recording import MODES, settings, shuffled

# Kernels run in Triton's interpreter on the CPU, and on a GPU where there is one. That is chosen when triton is first imported, which
# any test's imports may do, hence before torch can be asked whether it sees a GPU.
_GPU_NODES = ("/dev/nvidiactl", "/dev/kfd")
if not any(Path(node).exists() for node in _GPU_NODES):
    os.environ.setdefault("TRITON_INTERPRET", "1")

_IMPORTS_TORCH = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.torch", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("plumbline")
    group.addoption("--fast", action="store_true", help="leave out what needs torch or a browser, and do not import it")
    group.addoption("--recorded", choices=MODES, default="read", help="see tests/recorded/recording.py")
    group.addoption("--ranks", type=int, default=2, help="gloo processes of the tests of several ranks")
    group.addoption("--seed", default=settings["seed"], help="draws the programs that --recorded=sample runs again")


def pytest_configure(config: pytest.Config) -> None:
    settings.update({name: config.getoption(name) for name in ("recorded", "seed", "fast")})
    if config.getoption("fast"):
        config.option.markexpr = "not torch and not browser and not slow"


def pytest_report_header(config: pytest.Config) -> str:
    return f"recorded: {settings['recorded']}, seed: {settings['seed']}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers: the browser's tests stay together by file (they share its server), and a device is one worker's alone."""
    left_out = _left_out(items) if settings["recorded"] == "sample" else set()
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.xdist_group("gpu"))
        elif item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.xdist_group(item.path.name))


def _left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Cases of `sampled` tests that this run does not draw: the same in every worker."""
    cases: dict[tuple[str, int], dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        if marker := item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0], marker.args[0]][item.nodeid] = item
    return {found[name] for (_, drawn), found in cases.items() for name in shuffled(found)[drawn:]}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In the fast tier a file that is marked torch as a whole is not even imported."""
    if config.getoption("fast") and collection_path.suffix == ".py":
        return True if _IMPORTS_TORCH.search(collection_path.read_text()) else None
    return None
