"""What only a GPU has: the link to its host, its context, the matmuls' workspace, and memory that its allocator reserves.

Nothing here has run on a GPU yet. Without one each refuses, and says why.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import torch

from calc.hardware import gpu
from calc.measurements.records import Measured
from calc.model.config import from_config
from calc.training import TrainingPlan, train
from calc.training.overhead import overhead
from calc.units import MiB
from measure.setting import Setting
from measure.timing import time_call
from measure.workloads.cases import Case, each, needs_gpu
from measure.workloads.kernel_rows import bandwidth_row
from measure.workloads.models import SMALL
from measure.workloads.steps import Program, options_of

_BYTES: Final = {"small": (64 * MiB, "64 MiB"), "medium": (512 * MiB, "512 MiB")}
_ROOT: Final = Path(__file__).parents[2]


def pcie(setting: Setting) -> Iterator[Measured]:
    """`bandwidth/to device` and `bandwidth/to host` from pinned memory, one way each, against the data sheet's link."""
    needs_gpu(setting, "pcie")
    nbytes, title = _BYTES[setting.size]
    return each(setting, [Case(title, lambda divisor: _transfers(setting, nbytes // divisor))])


def _transfers(setting: Setting, nbytes: int) -> Iterator[Measured]:
    device = torch.device(setting.device.name)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    sheet = gpu(setting.device.catalogue).pcie_bandwidth if setting.device.catalogue else None
    for name, out, source in (("to device", there, host), ("to host", host, there)):
        times = time_call(partial(out.copy_, source, non_blocking=True), device)
        yield bandwidth_row(name, times, nbytes, sheet)


def context_and_workspace(setting: Setting) -> Iterator[Measured]:
    """What a process takes of the GPU besides its tensors, and what the allocator reserves beyond them, against `train`'s lines."""
    needs_gpu(setting, "context-and-workspace")
    cases = [
        Case("a process of its own", partial(_context, setting)),
        Case(f"{setting.size} Llama", partial(_reserved, setting)),
    ]
    return each(setting, cases)


# a second process makes a context and one tensor, says what its allocator holds, and waits
_TENANT: Final = """
import sys, torch
torch.ones(1, device=sys.argv[1]).add_(1)
torch.cuda.synchronize()
print(torch.cuda.memory_reserved(sys.argv[1]), flush=True)
sys.stdin.read()
"""


def _context(setting: Setting, divisor: int) -> Iterator[Measured]:
    """The driver's free memory before and while another process has a context."""
    before, _ = torch.cuda.mem_get_info(setting.device.name)
    command = [sys.executable, "-c", _TENANT, setting.device.name]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT, env=os.environ
    ) as tenant:
        assert tenant.stdout is not None
        said = tenant.stdout.readline()
        if not said:
            raise RuntimeError(
                "a second process could not use the GPU while this one has it (is it in exclusive mode?)"
            )
        reserved = int(said)
        during, _ = torch.cuda.mem_get_info(setting.device.name)
        tenant.communicate("")
    yield Measured("", "context", _lines(setting, 0)[0], before - during - reserved, "bytes")


def _reserved(setting: Setting, divisor: int) -> Iterator[Measured]:
    """The workspaces that the first matmul and its backward take, and reserved beyond allocated at the peak of two real steps."""
    device, config = torch.device(setting.device.name), SMALL[setting.size]
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    x = torch.ones(1024, 1024, dtype=torch.bfloat16, device=device, requires_grad=True)
    before = torch.cuda.memory_allocated(device)
    torch.autograd.grad(x @ x, x, x.detach())
    torch.cuda.synchronize(device)
    workspace = torch.cuda.memory_allocated(device) - before
    plan = TrainingPlan(seq=2048 // divisor)
    peak = train(from_config(config), plan).peak_bytes
    _, predicted_workspace, predicted_fragmentation = _lines(setting, peak)
    yield Measured("", "workspace", predicted_workspace, workspace, "bytes")
    del x
    torch.cuda.reset_peak_memory_stats(device)
    program = Program(config, options_of(plan), device)
    for _ in range(2):
        program.train()
        program.optimizer.step()
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    yield Measured("", "fragmentation", predicted_fragmentation, reserved - allocated, "bytes")
    yield Measured(
        "", "fragmentation over peak", predicted_fragmentation / peak, (reserved - allocated) / allocated, "ratio"
    )


def _lines(setting: Setting, peak: int) -> tuple[int, int, int]:
    """Context, workspace and fragmentation as `train` assumes them."""
    found = gpu(setting.device.catalogue) if setting.device.catalogue else None
    lines = overhead(TrainingPlan(), found, peak)
    return lines.context, lines.workspace, lines.fragmentation
