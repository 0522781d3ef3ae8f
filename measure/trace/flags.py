"""The flags of `python -m measure trace`: those of `train`, as far as a trace runs them, and its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calc.command_line.flags import FORMATS, Parser, add_gpu_flags, add_plan_flags
from calc.commands import Command, flag
from calc.errors import InputError, validated
from calc.training.plan import TrainingPlan
from measure.trace.options import TraceOptions

LINES = "jsonl"  # the events as they come: what the page reads

_SHARED = (
    "seq",
    "micro_batch",
    "recipe",
    "optimizer",
    "optimizer_kernel",
    "recompute",
    "attention",
    "dropout",
    "method",
    "lora_rank",
    "dp",
    "zero",
    "reshard_after_forward",
)
# What a trace runs, where a prediction knows more. A flag that is not here must keep its default.
_TRACED: Mapping[str, tuple[Any, ...]] = {
    "recipe": ("pure-bf16", "amp", "fp32", "fsdp-bf16"),
    "zero": (0, 1, 3),
    "reshard_after_forward": (True, False),
    "optimizer": ("adamw", "sgd", "momentum", "adafactor"),
    "recompute": ("none", "full"),
    "attention": ("sdpa", "eager"),
    "method": ("full", "lora", "dora", "qlora"),
    "loss": (None, "full"),
    "objective": ("pretrain", "sft"),
}
_FREE = (
    "context_mib",
    "nccl_mib",
    "workspace_mib",
    "fragmentation_percent",
    "seq",
    "micro_batch",
    "global_batch",
    "optimizer_kernel",
    "dropout",
    "lora_rank",
    "lora_targets",
    "dp",
)
_FLAGS = Command("trace", "", "calc.training.plan", "TrainingPlan", "")  # whose plan gives the flags


def parser() -> Parser:
    made = Parser(
        prog="python -m measure trace", description="Memory of a training step, observed.", allow_abbrev=False
    )
    made.add_argument("MODEL", help="a catalogue name, a path to a config.json or its folder, or - for standard input")
    add_gpu_flags(made)
    add_plan_flags(made, _FLAGS)
    made.add_argument(
        "--layers",
        default="auto",
        metavar="auto|all|N",
        help="decoder layers really run; the rest is extended from them",
    )
    made.add_argument(
        "--rounding", default="512", help="bytes that each storage is rounded up to, as the allocator does (1: none)"
    )
    made.add_argument("--seconds", default="120", help="stop the trace after this long")
    made.add_argument(
        "--ledger", action="store_true", help="print what each layer keeps for backward, operation by operation"
    )
    made.add_argument(
        "--compare", action="store_true", help="print the prediction against what was traced, with the error, by path"
    )
    made.add_argument(
        "--attached",
        action="store_true",
        help="stop when standard input ends, as the page does; MODEL - is its first line",
    )
    made.add_argument(
        "--format", default="table", metavar="|".join((*FORMATS, LINES)), help="how to print (default: table)"
    )
    return made


def plan_of(given: Mapping[str, Any]) -> TrainingPlan:
    """The plan that the flags describe, by the rules of a prediction. InputError when a trace does not run it."""
    values = {key: given[key] for key in TrainingPlan.model_fields if key in given}
    plan = validated(TrainingPlan, values, flag)
    _refuse(plan)
    return plan


def options_of(plan: TrainingPlan, given: Mapping[str, Any]) -> TraceOptions:
    shared = {name: getattr(plan, name) for name in _SHARED if name in given}  # the rest keeps the trace's own defaults
    return TraceOptions(
        **shared,
        accumulation=plan.microbatches,
        lora_targets=plan.lora_targets,
        rounding=_count("rounding", given["rounding"], 1, 2**21),
        layers=_layers(given["layers"]),
    )


def _refuse(plan: TrainingPlan) -> None:
    """InputError for the first flag that asks for what a trace does not run."""
    for name, field in TrainingPlan.model_fields.items():
        value = getattr(plan, name)
        allowed = _TRACED.get(name, (field.default,))
        if name not in _FREE and value not in allowed:
            raise InputError.of(
                flag(name), value, f"a trace runs {', '.join(str(each) for each in allowed if each is not None)} only"
            )
    if plan.recipe == "fsdp-bf16" and plan.zero != 3:
        raise InputError.of(flag("recipe"), plan.recipe, "a trace runs it with --zero 3 only, whose shards it casts")


def _layers(text: str) -> int | None:
    named = {"auto": None, "all": 0}
    return named[text] if text in named else _count("layers", text, 1, 4096)


def _count(name: str, text: str, low: int, high: int) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        raise InputError.of(flag(name), text, f"it must be a whole number from {low} to {high}")
    return int(text)


def seconds_of(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86400:
        raise InputError.of("--seconds", text, "it must be a number above 0, at most 86400")
    return seconds
