"""FLOPs of a real training step: calc's count and 6ND beside PyTorch's FlopCounterMode, and the MFU that the step reaches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import torch
from torch.utils.flop_counter import FlopCounterMode

from calc.compute import ComputePlan, compute
from calc.model.config import from_config
from calc.records import Measured
from calc.training import TrainingPlan
from measure.timing import time_call
from measure.workloads import Setting
from measure.workloads.cases import Case, each
from measure.workloads.kernel_rows import measured_roofs, sheet_roofs, time_row
from measure.workloads.models import config_of, name_of, two_depths, with_depth
from measure.workloads.steps import Program, options_of

_SEQ: Final = {"small": 256, "medium": 2048}


def run(setting: Setting) -> Iterator[Measured]:
    """`FLOPs`, `6ND over FLOPs`, `time/step` and `MFU` of forward and backward."""
    return each(setting, [Case(name_of(setting), partial(_counted, setting))])


def _counted(setting: Setting, divisor: int) -> Iterator[Measured]:
    """The user's model keeps its width and loses depth, so that it fits; the formulas are asked about the same."""
    config = config_of(setting)
    if setting.model:
        config = with_depth(config, two_depths(from_config(config))[1])
    on_cpu = setting.device.kind == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16
    seq = _SEQ[setting.size] // divisor
    # torch's counter knows CUDA's attention kernels and plain matmuls: on the CPU attention runs as matmuls
    plan = TrainingPlan(
        seq=seq, recipe="fp32" if on_cpu else "pure-bf16", attention="eager" if on_cpu else "sdpa", dropout="off"
    )
    device = torch.device(setting.device.name)
    program = Program(config, options_of(plan), device)
    answer = compute(from_config(config), ComputePlan(seq=seq))
    with FlopCounterMode(display=False) as counter:
        program.train()
    counted = counter.get_total_flops()
    yield Measured("", "FLOPs", answer.full.training_flops, counted, "FLOPs")
    yield Measured(
        "",
        "6ND over FLOPs",
        answer.full.six_nd_flops / answer.full.training_flops,
        answer.full.six_nd_flops / counted,
        "ratio",
    )
    times = time_call(program.train, device, seconds=1.0, warm_up=2, least=3)
    reached, sheet = measured_roofs(setting.device, dtype), sheet_roofs(setting.device, dtype)
    yield time_row("step", times, reached.flops and answer.full.training_flops / reached.flops)
    peak = sheet.flops or reached.flops
    assert peak
    against = "of the data sheet's peak" if sheet.flops else "of the matmul rate reached here"
    p20, middle, p80 = (answer.causal.training_flops / (peak * seconds) for seconds in reversed(times))
    yield Measured("", f"MFU {against}", None, middle, "ratio", p20, p80)
