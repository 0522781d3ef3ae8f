"""Every pipeline schedule run by processes that sleep: what ranks that only wait for each other's messages reach, against the simulation.

    torchrun --nproc-per-node 4 tests/measure/sleeping_stages.py [SECONDS]

Each rank runs its operations in the simulation's order, waits for what an operation needs by gloo messages, and sleeps as long as the
operation takes. SECONDS is one unit (0.1 unless given; the shorter, the more the machine's other work shows).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from calc.pipeline import SCHEDULES, PipelinePlan, simulate

KINDS = "FBIW"


class Rank:
    """One rank of a schedule: its operations in order, and the messages between them."""

    def __init__(self, plan: PipelinePlan, unit: float) -> None:
        self.plan, self.unit, self.mine = plan, unit, dist.get_rank()
        parts = plan.stages * plan.virtual_stages
        self.owner = {
            plan.model_stage(stage, chunk): stage
            for stage in range(plan.stages)
            for chunk in range(plan.virtual_stages)
        }
        self.last = parts - 1
        self.events = sorted(
            (event for event in simulate(plan).timeline if event.stage == self.mine), key=lambda event: event.start
        )

    def run(self) -> tuple[float, float]:
        """Seconds asleep, and until the last operation ended."""
        sent: list[dist.Work] = []
        busy = 0.0
        dist.barrier()
        begin = time.perf_counter()
        for event in self.events:
            part = self.plan.model_stage(event.stage, event.chunk)
            ahead = event.kind == "F"
            before, after = (part - 1, part + 1) if ahead else (part + 1, part - 1)
            kind = KINDS.index("F" if ahead else "B")
            if event.kind != "W":
                self._receive(before, part, kind, event.microbatch)
            length = (event.end - event.start) * self.unit
            time.sleep(length)
            busy += length
            if event.kind != "W":
                sent += self._send(after, kind, event.microbatch)
        ended = time.perf_counter() - begin
        for work in sent:
            work.wait()
        return busy, ended

    def _tag(self, part: int, kind: int, microbatch: int) -> int:
        return (microbatch * (self.last + 1) + part) * len(KINDS) + kind

    def _receive(self, before: int, part: int, kind: int, microbatch: int) -> None:
        if 0 <= before <= self.last and self.owner[before] != self.mine:
            dist.recv(torch.zeros(1), self.owner[before], tag=self._tag(part, kind, microbatch))

    def _send(self, after: int, kind: int, microbatch: int) -> list[dist.Work]:
        if not 0 <= after <= self.last or self.owner[after] == self.mine:
            return []
        work = dist.isend(torch.zeros(1), self.owner[after], tag=self._tag(after, kind, microbatch))
        return [work] if work else []


def main(unit: float = 0.1) -> None:
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    for name, schedule in SCHEDULES.items():
        chunks = 1 if schedule.chunks == "one" else 2
        plan = PipelinePlan(
            schedule=name, stages=ranks, microbatches=2 * ranks, virtual_stages=chunks, forward=1, backward_input=1, backward_weight=1
        )  # fmt: skip
        found = torch.tensor(Rank(plan, unit).run())
        both = [torch.zeros(2) for _ in range(ranks)]
        dist.all_gather(both, found)
        if dist.get_rank() == 0:
            busy, ended = (torch.stack(both)[:, i] for i in (0, 1))
            used, predicted = float(busy.sum() / ranks / ended.max()), simulate(plan).utilization
            print(
                f"{ranks} ranks {name:16} {used:.3f} measured {predicted:.3f} simulated {100 * (used - predicted):+.1f} points"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*(float(word) for word in sys.argv[1:]))
