"""Where the seconds of a pipeline's ranks go, as a breakdown."""

from __future__ import annotations

from collections.abc import Mapping

from calc.breakdown import Breakdown, Component, Formula
from calc.pipeline.plan import PipelinePlan
from calc.pipeline.schedules import SCHEDULES
from calc.pipeline.simulation import RankRun

_WORK = (("forward", "F"), ("backward_input", "I"), ("backward_weight", "W"))
_HOW = ("simulated operation by operation",)


def parts(plan: PipelinePlan, ranks: tuple[RankRun, ...], makespan: float) -> Breakdown:
    """The ranks' seconds from 0 to `makespan`: work by kind, and idle before, between and after it."""
    source = SCHEDULES[plan.schedule].source, SCHEDULES[plan.schedule].url
    work = {name: _sums(plan, name) for name, _ in _WORK}
    stages = tuple(
        Component(
            f"stage_{rank}",
            children=(
                *(_work(plan, name, letter, work[name][rank], source) for name, letter in _WORK),
                Component("idle", children=_idle(run, makespan, source)),
            ),
        )
        for rank, run in enumerate(ranks)
    )
    return Breakdown(Component("pipeline", children=stages), "seconds")


def _sums(plan: PipelinePlan, name: str) -> list[float]:
    """Per rank, the seconds of one micro-batch through all its chunks."""
    seconds = plan.seconds(name)
    return [sum(seconds[plan.model_stage(rank, chunk)] for chunk in range(plan.chunks)) for rank in range(plan.stages)]


def _work(plan: PipelinePlan, name: str, letter: str, seconds: float, source: tuple[str, str]) -> Component:
    assumes = ("one micro-batch takes this long through all chunks of the stage",)
    formula = Formula(rf"<m> \cdot <{letter}>", *source, assumes)
    return Component(
        name, plan.microbatches * seconds, formula=formula, numbers={"m": plan.microbatches, letter: seconds}
    )


def _idle(run: RankRun, makespan: float, source: tuple[str, str]) -> tuple[Component, ...]:
    numbers: Mapping[str, float] = {
        "first": run.first,
        "last": run.last,
        "busy": run.busy,
        "makespan": makespan,
    }
    rows = (
        ("before", run.first, "<first>"),
        ("between", run.waiting, r"\max(0, <last> - <first> - <busy>)"),
        ("after", makespan - run.last, "<makespan> - <last>"),
    )
    return tuple(
        Component(name, value, formula=Formula(latex, *source, _HOW), numbers=_used(latex, numbers))
        for name, value, latex in rows
    )


def _used(latex: str, numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if f"<{name}>" in latex}
