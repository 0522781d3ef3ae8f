"""FLOPs of a real training step: calc's count and 6ND against PyTorch's FlopCounterMode, and the MFU that the step reaches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import torch
from torch.utils.flop_counter import FlopCounterMode

from calc.compute import ComputeAnswer, ComputePlan, compute
from calc.measurements.records import Measured
from calc.model.config import from_config
from calc.training import TrainingPlan
from measure.setting import Setting
from measure.timing import Spread, time_call
from measure.workloads.cases import Case, each, timed_size
from measure.workloads.kernel_rows import measured_roofs, sheet_roofs, time_row
from measure.workloads.models import config_of, name_of, two_depths, with_depth
from measure.workloads.steps import Program, options_of

_SEQ: Final = {"small": 256, "medium": 2048}


def run(setting: Setting) -> Iterator[Measured]:
    """`FLOPs`, `6ND over FLOPs`, `time/step` and `MFU` of forward and backward."""
    setting = timed_size(setting)
    return each(setting, [Case(name_of(setting), partial(_counted, setting))])


def _counted(setting: Setting, divisor: int) -> Iterator[Measured]:
    """The user's model keeps its width and loses depth, so that it fits; the formulas are asked about the same."""
    config = config_of(setting)
    if setting.model:
        config = with_depth(config, two_depths(from_config(config))[1])
    on_cpu = setting.device.kind == "cpu"
    untimed = on_cpu and bool(setting.model)
    # torch's counter knows CUDA's attention kernels and plain matmuls: on the CPU attention runs as matmuls
    attention = "eager" if on_cpu else "sdpa"
    recipe = "fp32" if on_cpu and not untimed else "pure-bf16"
    plan = TrainingPlan.model_validate(
        {"seq": _SEQ[setting.size] // divisor, "recipe": recipe, "attention": attention, "dropout": "off"}
    )
    device = torch.device("meta" if untimed else setting.device.name)
    program = Program(config, options_of(plan), device)
    flops = compute(from_config(config), ComputePlan(seq=plan.seq))
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped}) as counter:
        program.train()
    counted = counter.get_total_flops()
    exact, six_nd = flops.full.training_flops, flops.full.six_nd_flops
    yield Measured("", "FLOPs", exact, counted, "FLOPs")
    yield Measured("", "6ND over FLOPs", six_nd / exact, six_nd / counted, "ratio")
    if untimed:  # a large model on a CPU: its operations are counted without memory, and take no time
        return
    times = time_call(program.train, device, seconds=1.0, warm_up=2, least=3)
    yield from _used(setting, times, flops)


def _grouped(a: Sequence[int], b: Sequence[int], *_: object, **__: object) -> int:
    """FLOPs of the experts' grouped matmul, which torch's counter does not know: every row meets one expert's matrix."""
    return 2 * a[-2] * a[-1] * b[-1]


def _used(setting: Setting, times: Spread, flops: ComputeAnswer) -> Iterator[Measured]:
    """The step's time against that of its FLOPs at the rate of a matmul, and its MFU of the data sheet's peak where there is one."""
    dtype = torch.float32 if setting.device.kind == "cpu" else torch.bfloat16
    reached, sheet = measured_roofs(setting.device, dtype), sheet_roofs(setting.device, dtype)
    peak = sheet.flops or reached.flops
    assert reached.flops
    assert peak
    yield time_row("step", times, flops.full.training_flops / reached.flops)
    against = "the data sheet's peak" if sheet.flops else "the matmul rate reached here"
    p20, middle, p80 = (flops.causal.training_flops / (peak * seconds) for seconds in reversed(times))
    yield Measured("", f"MFU of {against}", None, middle, "ratio", p20, p80)
