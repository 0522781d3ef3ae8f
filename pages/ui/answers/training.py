"""Views of a training answer: verdict, bar, curves through the step and against a field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import streamlit as st

from calc.commands import COMMANDS
from calc.errors import InputError
from calc.training import TrainingAnswer, TrainingPlan, train
from pages.ui import charts, parts, views, widgets
from pages.ui.charts import Curve, Limit
from pages.ui.numbers import Figure, Numbers, figures
from pages.ui.scenario import Scenario
from pages.ui.views import Verdict

LEVERS: Final = ("recipe", "recompute", "method", "implementation")


def verdict(answer: TrainingAnswer, numbers: Numbers) -> Verdict:
    """Whether the step fits, and by how much."""
    needs, has = numbers.show(answer.driver_bytes), numbers.show(answer.gpu_memory_bytes)
    beyond = answer.spec.beyond_positions("sequence", answer.plan.seq)
    said = [f"needs {needs} of {has} per GPU", numbers.headroom(answer.headroom_bytes), *beyond]
    most = numbers.show(answer.driver_upper_bytes)
    doubt = "" if answer.fits_at_most else f"but not with the highest overheads that were reported ({most})"
    return Verdict(answer.fits, "Training", "; ".join(filter(None, said)), doubt)


def limit_of(answer: TrainingAnswer) -> Limit | None:
    """The GPU's memory, where it is known."""
    return Limit("the GPU's memory", float(answer.gpu_memory_bytes)) if answer.gpu_memory_bytes else None


def picture(answer: TrainingAnswer, numbers: Numbers, _: Scenario) -> None:
    """One bar for one GPU of each stage, at the highest point of the step."""
    rows = parts.of_training(answer)
    said = f"One GPU at the highest point of the step, which is in the {answer.peak_phase}: "
    said += ", ".join(f"{name} {numbers.show(value)}" for name, value in parts.of_worst_stage(answer))
    charts.stacked(rows, "bytes", numbers, "memory bar", said, limit_of(answer))


def figures_of(answer: TrainingAnswer, numbers: Numbers, _: Scenario | None = None) -> list[Figure]:
    """The four figures under the bar."""
    return [
        numbers.bytes(
            "GPU memory",
            answer.driver_bytes,
            "As nvidia-smi shows it: peak allocated, and CUDA and framework overhead. With the highest overheads that were reported: "
            + numbers.show(answer.driver_upper_bytes),
        ),
        numbers.bytes(
            "Peak allocated", answer.peak_bytes, f"The highest point of the step, in the {answer.peak_phase}"
        ),
        numbers.bytes("Headroom", answer.headroom_bytes, "What is left of the GPU's memory as its driver shows it"),
        numbers.bytes("Activations", answer.activations_bytes, "What forward keeps for backward, at its end"),
    ]


def glance(asked: Scenario, numbers: Numbers) -> None:
    """The first page's answer for training: ribbon, bar, figures."""
    answer = COMMANDS["train"].answer(asked.of(COMMANDS["train"].plan), asked.spec(), asked.gpu())
    assert isinstance(answer, TrainingAnswer)
    views.verdict(verdict(answer, numbers))
    widgets.ask_row(TrainingPlan, LEVERS)
    picture(answer, numbers, asked)
    figures(figures_of(answer, numbers))


def through_the_step(answer: TrainingAnswer, numbers: Numbers, _: Scenario) -> None:
    """Memory through the step on the stage that needs most: the highest point of each segment, and of each phase."""
    stops = [(name, _named(found)) for name, found in answer.timeline()]
    phases = list(dict.fromkeys(name.partition(",")[0] for name, _ in stops))
    charts.title("Allocated by PyTorch while each layer runs: " + ", then ".join(phases))
    overhead = sum(answer.overhead)
    limit = limit_of(answer)
    said = f"Memory through the step, in {len(stops)} stops; the highest is {numbers.show(answer.peak_bytes)}, in the {answer.peak_phase}"
    charts.areas(
        stops, "bytes", numbers, "through the step", said,
        Limit("the GPU's memory without overhead", limit.value - overhead) if limit else None,
    )  # fmt: skip
    rows = {phase: _named(found) for phase, found in answer.phase_parts.items()}
    charts.title("The highest point of each phase")
    charts.stacked(rows, "bytes", numbers, "phases", f"Peak of each phase: {', '.join(rows)}")


def _named(found: Mapping[str, int]) -> parts.Parts:
    return parts.ordered((parts.name_of(name), size) for name, size in found.items())


AGAINST: Final[Mapping[str, Callable[[TrainingPlan], list[dict[str, Any]]]]] = {
    "Sequence (tokens)": lambda plan: [{"seq": value} for value in _steps(128, 2**18, plan.seq)],
    "Micro-batch": lambda plan: [
        {"micro_batch": value, "global_batch": None} for value in _steps(1, 64, plan.micro_batch)
    ],
    "GPUs (FSDP)": lambda plan: [
        {"dp": value, "zero": 3 if value > 1 else 0, "global_batch": None} for value in _steps(1, 256, plan.dp)
    ],
    "LoRA rank": lambda plan: [{"lora_rank": value} for value in _steps(1, 512, plan.lora_rank)] if plan.lora else [],
}


def _steps(low: int, high: int, now: int) -> list[int]:
    """Powers of two and the value that the plan has, in order."""
    powers = [low << place for place in range((high // low).bit_length())]
    return sorted({*powers, now})


def against(answer: TrainingAnswer, numbers: Numbers, asked: Scenario) -> None:
    """GPU memory against one field, all else as it is."""
    offered = {name: changes for name, found in AGAINST.items() if (changes := found(answer.plan))}
    chosen = st.segmented_control("Memory against", list(offered), key="memory against", default=next(iter(offered)))
    changes = offered[chosen or next(iter(offered))]
    field = next(iter(changes[0]))
    points = [(float(values[field]), _needed(answer, values)) for values in changes]
    name = chosen or "Sequence"
    charts.curves(
        [Curve("GPU memory (nvidia-smi)", points)], name, "bytes", numbers, f"against {field}",
        f"GPU memory against {name}", limit_of(answer), float(getattr(answer.plan, field)),
    )  # fmt: skip
    failed = sum(value is None for _, value in points)
    if failed:
        st.caption(f"{failed} values are left out: the other settings do not allow them.")


def _needed(answer: TrainingAnswer, values: Mapping[str, Any]) -> int | None:
    try:
        plan = TrainingPlan.model_validate({**answer.plan.model_dump(), **values})
        return train(answer.spec, plan, answer.gpu).driver_bytes
    except (InputError, ValueError):
        return None
