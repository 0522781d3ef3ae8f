"""Kernels run in Triton's interpreter on the CPU, and on a GPU where there is one (TRITON_INTERPRET=1 keeps to the CPU)."""

import os
from pathlib import Path

import pytest

# The interpreter must be chosen before triton is imported, hence before torch can be asked whether it sees a GPU.
_GPU_NODES = ("/dev/nvidiactl", "/dev/kfd")
if not any(Path(node).exists() for node in _GPU_NODES):
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where the kernel runs: `cpu` in the interpreter, `cuda` on the GPU; skipped where this process cannot."""
    torch = pytest.importorskip("torch")
    triton = pytest.importorskip("triton")
    interpreted = bool(triton.knobs.runtime.interpret)
    if request.param == "cpu" and not interpreted:
        pytest.skip("kernels are compiled for the GPU in this process; set TRITON_INTERPRET=1 to interpret them")
    if request.param == "cuda" and (interpreted or not torch.cuda.is_available()):
        pytest.skip("no GPU, or kernels are interpreted in this process")
    return request.param
