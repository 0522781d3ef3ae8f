"""Measuring on several devices: N processes under torchrun, NCCL between GPUs and gloo between CPUs.

`python -m measure run NAME --ranks N` starts them all on this machine, over the loopback interface alone. For many machines, or for
ranks on real network cards, torchrun itself starts `measure.distributed`, with its usual rendezvous flags:
`torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m measure.distributed NAME`.

The NCCL paths have not run on GPUs yet; gloo's have. Importing this imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Job:
    """What several ranks run together. Its module has `run(group, size)`, which every rank walks through and which yields rows on
    rank 0; what it yields on the others is dropped. `tests`, `needs` and `seconds` as in
    `measure.workloads.Workload`."""

    name: str
    module: str
    tests: str
    needs: str
    seconds: float


_DEVICES = "two or more GPUs (NCCL), or gloo processes on the CPU"
_TABLE = (
    Job(
        "collectives",
        "measure.distributed.collectives",
        "bytes a rank sends by the ring formulas, such as 2(n-1)/n·bytes for all-reduce; time and bus bandwidth by size",
        f"{_DEVICES}; 0.2 GB (small) or 2 GB (medium) a rank",
        8.0,
    ),
    Job(
        "ddp-states",
        "measure.distributed.ddp",
        "bytes a rank with dp=N, ZeRO off: states under DistributedDataParallel, and its gradient buckets",
        f"{_DEVICES}; 0.2 GB (small) or 4 GB (medium) a rank",
        12.0,
    ),
    Job(
        "zero1-states",
        "measure.distributed.zero1",
        "bytes a rank with dp=N, ZeRO-1: states under ZeroRedundancyOptimizer, which deals out whole tensors",
        f"{_DEVICES}; 0.2 GB (small) or 3 GB (medium) a rank",
        9.0,
    ),
    Job(
        "fsdp2-states",
        "measure.distributed.fsdp2",
        "bytes a rank with dp=N, ZeRO-3: shards under fully_shard, and the gathered weights left after forward, both reshard settings",
        f"{_DEVICES}; 0.2 GB (small) or 3 GB (medium) a rank",
        12.0,
    ),
    Job(
        "tensor-parallel",
        "measure.distributed.tensor_parallel",
        "bytes a rank with tp=N: states of a decoder under parallelize_module, and its loss against the whole model's",
        f"{_DEVICES}; 0.2 GB (small) or 3 GB (medium) a rank",
        9.0,
    ),
    Job(
        "pipeline-schedules",
        "measure.distributed.pipelines",
        "utilization of GPipe, 1F1B and interleaved by torch.distributed.pipelining against the simulation with the measured times",
        f"{_DEVICES}, one a stage; 0.2 GB (small) or 1 GB (medium) a rank",
        10.0,
    ),
)
JOBS: Final = {job.name: job for job in _TABLE}
