"""Every kernel compiles for GPUs and leaves room on a consumer card, without one at hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
CONSUMER = 99 * 1024  # bytes of shared memory that a block may have on GeForce cards from Ampere to Blackwell
NOT_KERNELS = {"__init__", "launch", "attention_tiles", "standard_attention"}


@pytest.mark.parametrize("arch", ["86", "90"])
def test_every_kernel_compiles_and_its_smallest_configuration_fits_a_consumer_card(arch):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)  # this process may interpret kernels; that one compiles them
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script), "cuda", arch, "32"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    shared = [json.loads(line) for line in done.stdout.splitlines()]
    assert {name.split(".")[0] for name, _ in shared} == {
        path.stem for path in (ROOT / "kernels").glob("*.py")
    } - NOT_KERNELS
    assert [(name, size) for name, size in shared if size > CONSUMER] == []
