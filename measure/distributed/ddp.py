"""States and gradient buckets of DistributedDataParallel: dp = N, ZeRO off.

DDP copies every gradient into buckets for the all-reduce. With `gradient_as_bucket_view=False`, its default, the buckets are a
second copy of all gradients, there from the wrapping on and never freed; with True the gradients are views into them.
"""

# no `from __future__ import annotations`: DDP reads the annotations of `_noting` and wants types, not their names
from collections.abc import Iterator

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from calc.measurements.records import Measured
from measure.distributed import states
from measure.distributed.group import Group
from measure.workloads.decoder_states import SIZES

RECIPES = ("fp32", "pure-bf16")


def run(group: Group, size: str) -> Iterator[Measured]:
    """Each rank's states, then `buckets` and `gradients_and_buckets`, the latter each storage once."""
    cases = [(recipe, view) for recipe in RECIPES for view in (False, True)]
    for index, (recipe, view) in enumerate(cases):
        case = states.case_of(group, size, recipe, f"gradient_as_bucket_view={view}")
        group.tell(index / len(cases), case)
        yield from _measured(group, size, recipe, view, case)


def _measured(group: Group, size: str, recipe: str, view: bool, case: str) -> Iterator[Measured]:
    expected = states.predicted(states.memory_of(SIZES[size], dp=group.size, recipe=recipe))
    model = DistributedDataParallel(
        states.decoder(SIZES[size], states.DTYPES[recipe], group), gradient_as_bucket_view=view
    )
    buckets: dict[int, int] = {}
    model.register_comm_hook(buckets, _noting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = states.tokens_of(SIZES[size], group, group.rank)
    states.trained(model, optimizer, tokens, steps=1)
    buckets.clear()  # of the first step, after which DDP makes them anew in the order that gradients came
    states.trained(model, optimizer, tokens, steps=1)
    yield from states.rows(group, case, [expected] * group.size, states.observed(model.parameters(), optimizer.state))
    gradients = states.storages(parameter.grad for parameter in model.parameters())
    held = [sum(buckets.values()), sum((gradients | buckets).values())]
    most = [max(each) for each in zip(*group.gather(held), strict=True)]
    yield Measured(case, "buckets", expected.gradients, most[0], "bytes")
    copies = 1 if view else 2
    yield Measured(case, "gradients_and_buckets", copies * expected.gradients, most[1], "bytes")


def _noting(buckets: dict[int, int], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's own all-reduce, and a note of the bucket's storage."""
    flat = bucket.buffer()
    storage = flat.untyped_storage()
    buckets[storage.data_ptr()] = storage.nbytes()
    flat.div_(dist.get_world_size())
    work = dist.all_reduce(flat, async_op=True)
    assert work is not None
    reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return reduced
