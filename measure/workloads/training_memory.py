"""The memory of a training step, predicted by `train`, against what the real program does.

On a GPU torch's allocator is read (not run on one yet); on the CPU the same program runs with fake tensors, by CUDA's choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch

from calc.breakdown import Number
from calc.compute import ComputePlan, compute
from calc.measurements.records import Measured
from calc.model.config import from_config
from calc.training import TrainingPlan, train
from measure.setting import Setting
from measure.timing import time_call
from measure.workloads.cases import Case, each
from measure.workloads.kernel_rows import time_row
from measure.workloads.models import config_of, llama, name_of, two_depths, with_depth
from measure.workloads.steps import (
    PEAKS,
    STATES,
    Program,
    Step,
    observed_step,
    options_of,
    predicted_step,
    quantity,
    step_rows,
)

_SEQ: Final = {"small": 512, "medium": 2048}
_GROWING: Final = ("activations", *PEAKS)


def saved_activations(setting: Setting) -> Iterator[Measured]:
    """Activations and peaks at two depths; their slope and intercept, extended to the full depth."""
    return each(setting, [Case(name_of(setting), partial(_at_two_depths, setting, config_of(setting)))])


def _at_two_depths(setting: Setting, config: Mapping[str, Any], divisor: int) -> Iterator[Measured]:
    spec = from_config(config)
    plan = TrainingPlan(seq=_SEQ[setting.size] // divisor)
    depths = two_depths(spec)
    found: list[tuple[Step, Step]] = []
    for depth in depths:
        cut = with_depth(config, depth)
        setting.tell(0.1 + 0.4 * len(found), f"{depth} of {len(spec.layers)} layers, sequences of {plan.seq}")
        found.append(_step(setting, cut, plan))
        for row in step_rows(*found[-1]):
            yield row._replace(case=f"{depth} of {len(spec.layers)} layers")
    (shallow, seen_shallow), (deep, seen_deep) = found
    full = predicted_step(train(spec, plan))
    periods = (len(spec.layers) - depths[0]) / (depths[1] - depths[0])
    for name in _GROWING:
        slopes = [
            getattr(more, name) - getattr(less, name) for less, more in ((shallow, deep), (seen_shallow, seen_deep))
        ]
        yield _row(f"each {depths[1] - depths[0]} more", f"slope/{quantity(name)}", slopes, "bytes")
        extended = round(getattr(seen_shallow, name) + periods * slopes[1])
        yield Measured(f"extended to {len(spec.layers)} layers", quantity(name), getattr(full, name), extended, "bytes")


def _row(case: str, quantity: str, both: Sequence[Number], unit: str) -> Measured:
    """A figure that follows from steps, predicted and observed."""
    predicted, observed = both
    return Measured(case, quantity, predicted, observed, unit)


def _step(setting: Setting, config: Mapping[str, Any], plan: TrainingPlan) -> tuple[Step, Step]:
    """One step, predicted and observed."""
    return predicted_step(train(from_config(config), plan)), observed_step(config, plan, setting.device)


def _plans(setting: Setting, plans: Mapping[str, Mapping[str, Any]], names: tuple[str, ...]) -> Iterator[Measured]:
    """A case for each plan: the same model trained another way."""
    config = config_of(setting)
    shallow = with_depth(config, two_depths(from_config(config))[1])

    def rows(fields: Mapping[str, Any], divisor: int) -> Iterator[Measured]:
        plan = TrainingPlan(seq=_SEQ[setting.size] // divisor, **fields)
        return step_rows(*_step(setting, shallow, plan), names)

    return each(
        setting, [Case(f"{name_of(setting)}, {title}", partial(rows, fields)) for title, fields in plans.items()]
    )


def amp(setting: Setting) -> Iterator[Measured]:
    """States, activations and peaks under autocast, against those in fp32 and in bf16 alone."""
    plans = {recipe: {"recipe": recipe} for recipe in ("amp", "fp32", "pure-bf16")}
    return _plans(setting, plans, Step._fields)


def lora(setting: Setting) -> Iterator[Measured]:
    """States and activations with adapters on q and v, on all linear layers, and in full training."""
    plans: dict[str, dict[str, Any]] = {
        "LoRA on q and v": {"method": "lora", "lora_targets": ("q_proj", "v_proj")},
        "LoRA on all linear": {"method": "lora", "lora_targets": ("all-linear",)},
        "full": {},
    }
    return _plans(setting, plans, Step._fields)


def optimizer_temporaries(setting: Setting) -> Iterator[Measured]:
    """The peak of the step, with each of PyTorch's kernels for AdamW: what lies above the states is temporary."""
    plans = {kernel: {"optimizer_kernel": kernel} for kernel in ("foreach", "loop", "fused")}
    return _plans(setting, plans, (*STATES, "step"))


def logits_peak(setting: Setting) -> Iterator[Measured]:
    """Peaks of a model that is nearly all head, at two vocabularies; their difference in units of the fp32 logits."""
    return each(setting, [Case("nearly all head", partial(_two_vocabularies, setting))])


_VOCABULARIES: Final = (16384, 32768)


def _two_vocabularies(setting: Setting, divisor: int) -> Iterator[Measured]:
    plan = TrainingPlan(seq=_SEQ[setting.size] // divisor)
    found = []
    for vocabulary in _VOCABULARIES:
        found.append(_step(setting, llama(256, 512, 1, 4, 4, vocabulary), plan))
        for row in step_rows(*found[-1], _GROWING):
            yield row._replace(case=f"V = {vocabulary}")
    logits = 4 * plan.seq * (_VOCABULARIES[1] - _VOCABULARIES[0])
    for name in ("forward", "backward"):
        both = [
            (_beyond_states(more, name) - _beyond_states(less, name)) / logits
            for less, more in zip(*found, strict=True)
        ]
        yield _row("slope over V", f"{quantity(name)} over fp32 logits", both, "ratio")


def _beyond_states(step: Step, name: str) -> int:
    """The peak without weights and optimizer state, which grow with the vocabulary too."""
    return int(getattr(step, name)) - step.parameters - step.optimizer


def checkpointing(setting: Setting) -> Iterator[Measured]:
    """What recomputing every layer saves, and the time that it takes."""
    config = config_of(setting)
    cases = [
        Case(f"{name_of(setting)}, memory", partial(_saving, setting, config)),
        Case(f"{setting.size} Llama, time", partial(_extra_time, setting)),
    ]
    return each(setting, cases)


def _saving(setting: Setting, config: Mapping[str, Any], divisor: int) -> Iterator[Measured]:
    shallow = with_depth(config, two_depths(from_config(config))[1])
    found = {}
    for recompute in ("none", "full"):
        plan = TrainingPlan(seq=_SEQ[setting.size] // divisor, recompute=recompute)
        found[recompute] = _step(setting, shallow, plan)
        for row in step_rows(*found[recompute], _GROWING):
            yield row._replace(case=f"recompute {recompute}")
    savings = [all_.activations - few.activations for all_, few in zip(found["none"], found["full"], strict=True)]
    yield _row("", "saving/activations", savings, "bytes")


# a model whose matmuls outweigh everything else, and few enough of them to be timed in seconds
_TIMED: Final = {"small": (llama(256, 704, 4, 4, 4, 500), 256), "medium": (llama(2048, 5504, 8, 16, 16, 32000), 4096)}


def _extra_time(setting: Setting, divisor: int) -> Iterator[Measured]:
    """Seconds of forward and backward, with and without recomputation, against the FLOPs' ratio."""
    config, seq = _TIMED[setting.size]
    device = torch.device(setting.device.name)
    recipe = "fp32" if setting.device.kind == "cpu" else "pure-bf16"
    times = {}
    for recompute in ("none", "full"):
        plan = TrainingPlan(seq=seq // divisor, recompute=recompute, recipe=recipe)
        program = Program(config, options_of(plan), device)
        times[recompute] = time_call(program.train, device, seconds=1.0, warm_up=2, least=5)
        yield time_row(f"recompute {recompute}", times[recompute], None)
        del program  # before the next is built
    flops = compute(from_config(config), ComputePlan(seq=seq // divisor, recompute="full")).full
    predicted = flops.hardware_flops / flops.training_flops - 1
    yield Measured("", "extra time", predicted, times["full"].median / times["none"].median - 1, "ratio")
