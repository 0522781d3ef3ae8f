"""`plan`: layouts that fit, worked out exactly and ranked, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from calc.breakdown import Breakdown, Component
from calc.communication import usual_links
from calc.errors import InputError
from calc.hardware import Gpu
from calc.model.spec import ModelSpec
from calc.planner.candidates import OFFLOAD, RECOMPUTE, Candidates, candidates
from calc.planner.plan import SearchPlan
from calc.step_time import TimeAnswer, TimePlan, step_time
from calc.training import train

# how many layouts are worked out exactly, the most promising first, and up to how many all are: at about 4 ms each this takes a
# second; where memory is a replay of the allocator, 40 ms, several
EXACT: Final = {True: 240, False: 120}
SMALL: Final = {True: 700, False: 250}
_FEW: Final = 4  # layouts of each division that are worked out before any more of another
_ROOMY: Final = 1.1  # of the memory, the estimate of a layout that is still worth working out before slower ones


@dataclass(frozen=True, eq=False)
class Layout:
    """One layout that fits, with its memory and its time."""

    plan: TimePlan
    peak_bytes: int
    driver_bytes: int
    time: TimeAnswer

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells layouts apart."""
        p = self.plan
        return (
            p.tp, p.pp, p.virtual_stages, p.cp, p.ep, p.dp, p.zero, p.micro_batch, p.recompute, p.dp_replicate, p.offload,
        )  # fmt: skip

    def as_json(self, best: Layout) -> dict[str, Any]:
        """The layout, and in which part of the step it is slower than the best one."""
        p, time = self.plan, self.time
        names = (
            "tp", "pp", "cp", "ep", "dp", "dp_replicate", "zero", "virtual_stages", "micro_batch", "recompute", "schedule", "offload",
        )  # fmt: skip
        return {
            "gpus": p.gpus,
            **{name: getattr(p, name) for name in names},
            "peak_bytes": self.peak_bytes,
            "driver_bytes": self.driver_bytes,
            "step_seconds": time.step_seconds,
            "tokens_per_s_per_gpu": time.tokens_per_s_per_gpu,
            "mfu": time.mfu,
            "hours": time.run.seconds / 3600,
            "cost": time.run.cost,
            "slower_by": _excess(self, best),
        }


def _excess(layout: Layout, best: Layout) -> str:
    """The part of the step that costs the layout most against the best one."""
    if layout is best:
        return ""
    ours, theirs = (_groups(one) for one in (layout, best))
    more = {name: ours.get(name, 0.0) - theirs.get(name, 0.0) for name in {**ours, **theirs}}
    name = max(more, key=lambda each: more[each])
    if more[name] <= 0:
        return ""
    return f"{name.replace('_', ' ')}: {100 * more[name] / best.time.step_seconds:.1f} % of the best step"


def _groups(layout: Layout) -> dict[str, float]:
    """Seconds of a step by kind of work, for a token, so that layouts of unequal batches compare."""
    found: dict[str, float] = {}
    for row in layout.time.breakdown.rows():
        _, name, *rest = row.path.split("/")
        label = rest[-1] if name in ("layers", "ends") else name
        label = "recomputation" if "recomputed" in rest else label
        found[label] = found.get(label, 0.0) + float(row.value)
    return found


@dataclass(frozen=True, eq=False)
class SearchAnswer:
    """The layouts that fit, best first. `exact` says whether every valid layout was worked out, or the most promising alone."""

    spec: ModelSpec
    plan: SearchPlan
    gpu: Gpu
    layouts: tuple[Layout, ...]
    considered: int
    fitting: int
    worked_out: int
    exact: bool
    rejected: dict[str, int]

    @cached_property
    def breakdown(self) -> Breakdown:
        """The best layout's step; nothing where none fits."""
        return self.layouts[0].time.breakdown if self.layouts else Breakdown(Component("step"), "seconds")

    def as_json(self) -> dict[str, Any]:
        """The answer with the keys of `python -m calc plan`."""
        shown = self.layouts[: self.plan.limit]
        return {
            "model": self.spec.name,
            "gpu": self.gpu.name,
            "layouts": [one.as_json(self.layouts[0]) for one in shown],
            "considered": self.considered,
            "fitting": self.fitting,
            "worked_out": self.worked_out,
            "exact": self.exact,
            "rejected": self.rejected,
            "components": self.breakdown.components() if self.layouts else [],
            "notes": list(self._notes()),
        }

    def _notes(self) -> Iterator[str]:
        if not self.exact:
            yield (
                f"{self.worked_out:,} layouts were worked out exactly, the most promising of those that may fit by a rough estimate; "
                "fitting counts those among them"
            )
        if not self.layouts:
            yield "no layout fits: more GPUs, more memory, a smaller batch or a looser deadline or budget would help"


def search(spec: ModelSpec, plan: SearchPlan, gpu: Gpu | None = None) -> SearchAnswer:
    """Layouts of a run on GPUs of one kind, ranked.

    All valid combinations of tp, pp, virtual stages, cp, ep, dp, ZeRO, HSDP (shards within a domain), micro-batch, recomputation and
    states on the host are listed at once; memory
    (`train`) and time (`step_time`) are worked out for each of them, or for the most promising `EXACT` where they are over `SMALL`.
    """
    spec.must_read_text()
    if gpu is None:
        raise InputError(
            "gpu: none is given; plan needs one of python -m calc gpus, such as --gpu h100-sxm-80gb", "gpu"
        )
    if gpu.memory_bytes is None:
        raise InputError.of("gpu", gpu.name, "its memory is unknown; --gpu-memory-gib gives it")
    domain = plan.gpus_per_node or usual_links(gpu)[0]
    found = candidates(spec, plan, gpu, _counts(plan, domain), domain)
    rejected = dict(found.rejected)
    layouts: list[Layout] = []
    quick = plan.implementation == "fused"
    tried, most = 0, len(found) if len(found) <= SMALL[quick] else EXACT[quick]
    for index in _order(found, plan, gpu):
        if tried >= most:
            break
        tried += 1
        layout = _worked_out(spec, plan, gpu, found.row(index), rejected)
        if layout is not None:
            layouts.append(layout)
    layouts.sort(key=lambda one: (_rank(plan, one), one.time.step_seconds, one.key))
    return SearchAnswer(
        spec, plan, gpu, tuple(layouts), found.considered, len(layouts), tried, tried == len(found), rejected
    )


def _counts(plan: SearchPlan, domain: int) -> tuple[int, ...]:
    """The GPU counts to try: the one that was given, or whole domains in powers of two."""
    if plan.gpus is not None:
        return (plan.gpus,)
    counts = [1, 2, 4]
    size = 8
    while size <= plan.most_gpus:
        counts.append(size)
        size *= 2
    return tuple(count for count in counts if count <= plan.most_gpus)


def _order(found: Candidates, plan: SearchPlan, gpu: Gpu) -> list[int]:
    """Indices of the layouts, the most promising first: those that seem to fit before those that seem not to."""
    limit = float(gpu.memory_bytes or 1)
    cost = found.seconds * found.columns["gpus"]
    by = {"memory": found.bytes, "cost": cost}.get(plan.sort, found.seconds if plan.gpus is not None else cost)
    hopeless = found.bytes > _ROOMY * limit
    if plan.deadline_hours is not None:
        steps = (plan.tokens or 0) / (plan.global_batch * plan.seq)
        hopeless |= found.seconds * steps > 1.5 * plan.deadline_hours * 3600
    order = np.lexsort((found.bytes, by, hopeless))
    # the best few of every way to divide tensors, experts, states and layers come first: the estimate is roughest between those
    columns = {**found.columns, "piped": (found.columns["pp"] > 1).astype(np.int64)}
    names = ("gpus", "tp", "ep", "zero", "piped", "recompute")
    seen: dict[tuple[int, ...], int] = {}
    place = np.empty(len(order), dtype=np.int64)
    for index, key in zip(order, zip(*(columns[name][order].tolist() for name in names), strict=True), strict=True):
        place[index] = seen[key] = seen.get(key, -1) + 1
    return [int(index) for index in np.lexsort((found.bytes, by, place // _FEW, hopeless))]


def _worked_out(
    spec: ModelSpec, plan: SearchPlan, gpu: Gpu, row: dict[str, int], rejected: dict[str, int]
) -> Layout | None:
    """The layout with memory and time, or None and the reason counted."""

    def lost(reason: str) -> None:
        rejected[reason] = rejected.get(reason, 0) + 1

    try:
        layout = time_plan(plan, row)
        memory = train(spec, layout, gpu)
        if memory.peak_bytes > (gpu.memory_bytes or 0) or not memory.fits:
            lost("memory exceeded")
            return None
        time = step_time(spec, layout, gpu)
        _ = time.step_seconds
    except ValueError as error:
        lost(str(error).splitlines()[0][:200] if isinstance(error, InputError) else "breaks a rule of train")
        return None
    if plan.deadline_hours is not None and time.run.seconds > plan.deadline_hours * 3600:
        lost("misses the deadline")
        return None
    if plan.budget is not None and (time.run.cost is None or time.run.cost > plan.budget):
        lost("beyond the budget" if time.run.cost is not None else "the price of this GPU is unknown")
        return None
    return Layout(layout, memory.peak_bytes, memory.driver_bytes, time)


def time_plan(plan: SearchPlan, row: dict[str, int]) -> TimePlan:
    """A layout's numbers as a plan of `time` and `train`."""
    names = ("tp", "pp", "cp", "ep", "dp", "dp_replicate", "zero", "micro_batch", "virtual_stages")
    return TimePlan(
        **{name: row[name] for name in names},
        recompute=RECOMPUTE[row["recompute"]],
        offload=OFFLOAD[row["offload"]],
        schedule="interleaved" if row["virtual_stages"] > 1 else "1f1b",
        seq=plan.seq,
        global_batch=plan.global_batch,
        recipe=plan.used_recipe,
        matmul=plan.matmul,
        implementation=plan.implementation,
        optimizer_kernel="fused" if plan.implementation in ("fused", "torchtitan") else "foreach",
        gpus_per_node=plan.gpus_per_node,
        inter_GBps=plan.inter_GBps,
        tokens=plan.tokens,
        price_per_gpu_hour=plan.price_per_gpu_hour,
    )


def _rank(plan: SearchPlan, layout: Layout) -> float:
    if plan.sort == "memory":
        return float(layout.driver_bytes)
    if plan.sort == "cost" or plan.gpus is None:
        run = layout.time.run
        return run.cost if run.cost is not None else run.gpu_hours
    return layout.time.step_seconds
