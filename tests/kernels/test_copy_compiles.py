"""The copy kernel compiles for GPUs old and new, without one at hand, and moves 16 bytes at a time there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.torch

# architecture, threads of a warp, the 16-byte load and store of its assembly
TARGETS = [
    ("cuda", 75, 32, "ld.global.v4.b32", "st.global.v4.b32"),
    ("cuda", 80, 32, "ld.global.v4.b32", "st.global.v4.b32"),
    ("cuda", 90, 32, "ld.global.v4.b32", "st.global.v4.b32"),
    ("cuda", 100, 32, "ld.global.v4.b32", "st.global.v4.b32"),
    ("hip", "gfx942", 64, "global_load_dwordx4", "global_store_dwordx4"),
]
SCRIPT = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.copy import _CONFIGS, _copy

aligned = {(place,): [["tt.divisibility", 16]] for place in range(3)}
signature = {"x_ptr": "*i16", "out_ptr": "*i16", "n": "i32", "BLOCK": "constexpr"}
for backend, arch, warp in json.loads(sys.argv[1]):
    config = _CONFIGS[-1]
    source = ASTSource(_copy.fn, signature, {"BLOCK": config.kwargs["BLOCK"]}, aligned)
    options = {"num_warps": config.num_warps}
    made = triton.compile(source, target=GPUTarget(backend, arch, warp), options=options)
    print(json.dumps(made.asm.get("ptx") or made.asm["amdgcn"]))
"""


@pytest.fixture(scope="module")
def assembly(tmp_path_factory):
    """Assembly for each target, compiled by a process that does not interpret kernels as this one may."""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", SCRIPT, json.dumps([target[:3] for target in TARGETS])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("place", range(len(TARGETS)), ids=[str(target[1]) for target in TARGETS])
def test_it_loads_and_stores_16_bytes_at_a_time(assembly, place):
    *_, load, store = TARGETS[place]
    assert load in assembly[place]
    assert store in assembly[place]
