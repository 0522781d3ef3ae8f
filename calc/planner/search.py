"""`plan`: layouts that fit, worked out exactly and ranked, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Final, TypeVar

import numpy as np

from calc.breakdown import Breakdown, Component
from calc.communication import usual_links
from calc.errors import InputError
from calc.hardware import Gpu
from calc.model.spec import ModelSpec
from calc.planner.candidates import OFFLOAD, RECOMPUTE, Candidates, candidates
from calc.planner.plan import SearchPlan
from calc.step_time import TimeAnswer, TimePlan, step_time
from calc.step_time.labels import part_label
from calc.training import train

EXACT: Final = (
    240  # layouts that are timed exactly, the most promising first; at about 2 ms each this takes half a second
)
# up to how many layouts all are worked out, memory too: 4 ms each, and 40 where it is a replay of the allocator
SMALL: Final = {"fused": 700}
_SMALL_REPLAYED: Final = 250
_FEW: Final = 4  # layouts of each division that are worked out before any more of another
_REFINED: Final = 5  # best layouts whose other micro-batches are tried too
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
    return f"{part_label(name)}: {100 * more[name] / best.time.step_seconds:.1f} % of the best step"


def _groups(layout: Layout) -> dict[str, float]:
    """Seconds of a step by kind of work."""
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
                f"{self.worked_out:,} layouts were timed exactly, the most promising of those that may fit by a rough estimate; memory was "
                "worked out for the best of them, until enough fit to be shown"
            )
        if not self.layouts:
            yield "no layout fits: more GPUs, more memory, a smaller batch or a looser deadline or budget would help"


def search(spec: ModelSpec, plan: SearchPlan, gpu: Gpu | None = None) -> SearchAnswer:
    """Layouts of a run on GPUs of one kind, ranked.

    All valid combinations of tp, pp, virtual stages, cp, ep, dp, ZeRO, HSDP (shards within a domain), micro-batch, recomputation and
    states on the host are listed at once. Time (`step_time`) and memory (`train`) are worked out for each of them; of more than `SMALL`,
    time for the most promising `EXACT`, and memory for the best of these until `limit` fit; then the other micro-batches of the best.
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
    most = len(found) if len(found) <= SMALL.get(plan.implementation, _SMALL_REPLAYED) else EXACT
    exact = most == len(found)
    tried = _order(found, plan, gpu)[:most]
    timed = list(_kept((_timed(spec, plan, gpu, found.row(index)) for index in tried), rejected))
    enough = None if exact or plan.sort == "memory" else plan.limit
    if enough is not None:
        timed.sort(key=lambda time: _key(plan, time))
    layouts = list(islice(_kept((_fitting(spec, gpu, time) for time in timed), rejected), enough))
    layouts.sort(key=lambda one: (*_key(plan, one.time, one.driver_bytes), one.key))
    if enough is not None and layouts:
        others = _other_micro_batches(found, layouts[:_REFINED], set(tried))
        more = _kept((_timed(spec, plan, gpu, found.row(index)) for index in others), rejected)
        faster = (time for time in more if _key(plan, time) < _key(plan, layouts[0].time))
        layouts += _kept((_fitting(spec, gpu, time) for time in faster), rejected)
        layouts.sort(key=lambda one: (*_key(plan, one.time, one.driver_bytes), one.key))
        layouts, most = layouts[:enough], most + len(others)
    return SearchAnswer(spec, plan, gpu, tuple(layouts), found.considered, len(layouts), most, exact, rejected)


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


def _other_micro_batches(found: Candidates, layouts: list[Layout], tried: set[int]) -> list[int]:
    """Indices of layouts not yet tried that differ from one of these in the micro-batch alone: there the estimate of memory is roughest."""
    near: set[int] = set()
    for one in layouts:
        p = one.plan
        same = {
            name: getattr(p, name)
            for name in ("gpus", "tp", "pp", "cp", "ep", "dp", "dp_replicate", "zero", "virtual_stages")
        }
        same |= {"recompute": RECOMPUTE.index(p.recompute), "offload": OFFLOAD.index(p.offload)}
        alike = np.logical_and.reduce([found.columns[name] == value for name, value in same.items()])
        near.update(np.flatnonzero(alike).tolist())
    return sorted(near - tried)


_T = TypeVar("_T", TimeAnswer, Layout)


def _kept(answers: Iterable[_T | str], rejected: dict[str, int]) -> Iterator[_T]:
    """What was not lost; why the others were is counted in `rejected`."""
    for one in answers:
        if isinstance(one, str):
            rejected[one] = rejected.get(one, 0) + 1
        else:
            yield one


def _timed(spec: ModelSpec, plan: SearchPlan, gpu: Gpu, row: dict[str, int]) -> TimeAnswer | str:
    """A layout's time, or why it is lost."""
    try:
        time = step_time(spec, time_plan(plan, row), gpu)
        run = time.run
    except ValueError as error:
        return _reason(error)
    if plan.deadline_hours is not None and run.seconds > plan.deadline_hours * 3600:
        return "misses the deadline"
    if plan.budget is not None and (run.cost is None or run.cost > plan.budget):
        return "beyond the budget" if run.cost is not None else "the price of this GPU is unknown"
    return time


def _fitting(spec: ModelSpec, gpu: Gpu, time: TimeAnswer) -> Layout | str:
    """A layout with its memory, or why it is lost."""
    try:
        memory = train(spec, time.plan, gpu)
        fits = memory.peak_bytes <= (gpu.memory_bytes or 0) and memory.fits
    except ValueError as error:
        return _reason(error)
    return Layout(time.plan, memory.peak_bytes, memory.driver_bytes, time) if fits else "memory exceeded"


def _reason(error: ValueError) -> str:
    return str(error).splitlines()[0][:200] if isinstance(error, InputError) else "breaks a rule of train"


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


def _key(plan: SearchPlan, time: TimeAnswer, driver_bytes: int = 0) -> tuple[float, float]:
    """What layouts are sorted by: the rank, then the step."""
    return _rank(plan, time, driver_bytes), time.step_seconds


def _rank(plan: SearchPlan, time: TimeAnswer, driver_bytes: int = 0) -> float:
    if plan.sort == "memory":
        return float(driver_bytes)
    if plan.sort == "cost" or plan.gpus is None:
        return time.run.cost if time.run.cost is not None else time.run.gpu_hours
    return time.step_seconds
