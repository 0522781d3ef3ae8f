"""The answer: the collectives of the slowest pipeline stage with their seconds, and what of them compute does not hide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calc.breakdown import Breakdown, Component, Formula, unique_names
from calc.communication.collectives import Collective, Overlap, collectives_of
from calc.communication.plan import CommunicationPlan
from calc.communication.topology import Topology, network_note, topology_of
from calc.errors import InputError
from calc.flops import token_flops
from calc.hardware import Gpu
from calc.model.spec import ModelSpec
from calc.training.pipeline_stages import Stage, stages

_FORMULA = {
    kind: Formula(latex, "NCCL, doc/PERFORMANCE.md of nccl-tests", "https://github.com/NVIDIA/nccl-tests", assumes)
    for kind, latex, assumes in (
        ("all_reduce", r"<c> \cdot <t>", ("a ring moves 2 (n-1)/n of the tensor, a tree or NVLS less",)),
        ("all_gather", r"<c> \cdot <t>", ("a rank receives (n-1)/n of the tensor",)),
        ("reduce_scatter", r"<c> \cdot <t>", ("a rank sends (n-1)/n of the tensor",)),
        ("all_to_all", r"<c> \cdot <t>", ("tokens are spread evenly",)),
        ("send", r"<c> \cdot <t>", ()),
    )
}


@dataclass(frozen=True, slots=True)
class Timed:
    """A collective with the seconds of all its calls, and those that compute does not hide."""

    collective: Collective
    seconds: float
    exposed: float

    def as_json(self) -> dict[str, Any]:
        """The keys of the command line."""
        one = self.collective
        return {
            "name": one.name,
            "kind": one.kind,
            "group": one.group.name,
            "ranks": one.group.ranks,
            "calls": one.calls,
            "bytes": one.total_bytes,
            "sent_bytes": one.sent_bytes,
            "seconds": self.seconds,
            "exposed_seconds": self.exposed,
            "overlaps": one.overlaps,
        }


@dataclass(frozen=True, slots=True)
class CommunicationAnswer:
    """One step's communication on the pipeline stage where most of it is exposed."""

    spec: ModelSpec
    plan: CommunicationPlan
    gpu: Gpu
    stage: Stage
    collectives: tuple[Timed, ...]
    source: str
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.collectives)

    @property
    def exposed_seconds(self) -> float:
        return sum(each.exposed for each in self.collectives)

    @property
    def breakdown(self) -> Breakdown:
        """Seconds by group and collective."""
        by_group: dict[str, list[Component]] = {}
        for each in self.collectives:
            one = each.collective
            numbers = {"c": one.calls, "t": each.seconds / one.calls}
            leaf = Component(one.name, each.seconds, formula=_FORMULA[one.kind], numbers=numbers)
            by_group.setdefault(one.group.name, []).append(leaf)
        children = tuple(Component(name, children=unique_names(parts)) for name, parts in by_group.items())
        return Breakdown(Component("communication", children=children), "seconds")

    def as_json(self) -> dict[str, Any]:
        """The answer with the keys of the command line."""
        return {
            "model": self.spec.name,
            "gpu": self.gpu.name,
            "gpus": self.plan.gpus,
            "stage": self.stage.rank,
            "collectives": [each.as_json() for each in self.collectives],
            "bytes": sum(each.collective.total_bytes for each in self.collectives),
            "seconds": self.seconds,
            "exposed_seconds": self.exposed_seconds,
            "source": self.source,
            "components": self.breakdown.components(),
            "assumptions": list(self.spec.assumptions),
            "notes": list(self.notes),
        }


def communication(spec: ModelSpec, plan: CommunicationPlan, gpu: Gpu | None = None) -> CommunicationAnswer:
    """The collectives of one step, on the stage where most is exposed. InputError without a GPU, whose links take the time."""
    if gpu is None:
        raise InputError("gpu: communication needs the GPU whose links carry it; --gpu names one", "gpu")
    topology = topology_of(gpu, plan.times, plan.gpus_per_node, plan.intra_GBps, plan.inter_GBps)
    windows = compute_windows(spec, plan, topology)
    timed = {
        stage: exposed(topology, collectives_of(spec, plan, stage), windows, plan.microbatches)
        for stage in stages(plan, spec)
    }
    worst = max(timed, key=lambda stage: sum(each.exposed for each in timed[stage]))
    return CommunicationAnswer(
        spec, plan, gpu, worst, timed[worst], topology.times.source, tuple(_notes(plan, gpu, topology))
    )


def compute_windows(spec: ModelSpec, plan: CommunicationPlan, topology: Topology) -> Mapping[Overlap, float]:
    """Seconds of a rank's compute in one step behind which communication may hide: its FLOPs at the rate of its own large GEMMs."""
    tokens = plan.sequences * plan.seq // plan.cp
    width = max(1, 4 * spec.hidden_size // plan.tp)
    shape = (tokens, width, spec.hidden_size)
    rate = 2 * shape[0] * shape[1] * shape[2] / float(topology.times.gemm(*shape))
    each = token_flops(spec, plan.seq, True).forward * tokens / (plan.tp * plan.pp) / rate
    forward = each * plan.microbatches
    backward = (3 if plan.recompute == "full" else 2) * forward
    return {"nothing": 0.0, "forward": forward, "backward": backward, "last backward": backward / plan.microbatches}


def exposed(
    topology: Topology, found: tuple[Collective, ...], windows: Mapping[Overlap, float], microbatches: int
) -> tuple[Timed, ...]:
    """Each collective's seconds and their exposed share: of what shares a window, the sum beyond the window is exposed, and
    never less than one call, the first before or the last after compute."""
    seconds = [
        each.calls * topology.seconds(each.kind, each.bytes, each.group.ranks, each.group.stride) for each in found
    ]
    shares: dict[Overlap, float] = {}
    for window, length in windows.items():
        mine = [(s, each) for s, each in zip(seconds, found, strict=True) if each.overlaps == window]
        total = sum(s for s, _ in mine)
        ends = max((s / each.calls for s, each in mine), default=0.0)
        shares[window] = max(total - length, min(total, ends)) / total if total else 0.0
    return tuple(Timed(each, s, s * shares[each.overlaps]) for s, each in zip(seconds, found, strict=True))


def _notes(plan: CommunicationPlan, gpu: Gpu, topology: Topology) -> list[str]:
    notes = list(topology.times.notes)
    if plan.gpus > topology.gpus_per_node:
        notes += network_note(gpu, topology, plan.gpus, plan.inter_GBps)
        notes.append(
            "between nodes: NCCL's own model and 94 % of the adapters' bandwidth; against all-reduces of PyTorch on four nodes of "
            "eight B200 the median error is 12 %, but from 512 KiB to 64 MiB they took 1.2 to 2.2 times as long"
        )
    notes.append(
        "exposed: what compute at the rate of large GEMMs does not hide; the program is assumed to overlap where it can"
    )
    return notes
