"""States under ZeroRedundancyOptimizer: dp = N, ZeRO-1.

PyTorch deals out whole tensors, largest first, each to the rank that has least so far. calc.training divides evenly, as ZeRO's paper
and Megatron do; the rank with most holds at most that and one tensor more, and exactly what `states.dealt` says.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from calc.measurements.records import Measured
from measure.distributed import states
from measure.distributed.group import Group
from measure.workloads.decoder_states import SIZES

RECIPES = ("fp32", "pure-bf16")


def run(group: Group, size: str) -> Iterator[Measured]:
    """Each rank's states, then `largest_share/optimizer`: ZeRO's even division against the rank that holds most."""
    for index, recipe in enumerate(RECIPES):
        case = states.case_of(group, size, recipe)
        group.tell(index / len(RECIPES), case)
        memory = states.memory_of(SIZES[size], dp=group.size, zero=1, recipe=recipe)
        even = states.predicted(memory)
        shares = states.dealt(states.tensor_elements(memory), group.size)
        expected = [even._replace(optimizer=states.moment_bytes(recipe) * share) for share in shares]
        model = DistributedDataParallel(states.decoder(SIZES[size], states.DTYPES[recipe], group))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-4)
        states.trained(model, optimizer, states.tokens_of(SIZES[size], group, group.rank))
        found = states.observed(model.parameters(), optimizer.optim.state)
        yield from states.rows(group, case, expected, found)
        most = max(group.gather(found.optimizer))
        yield Measured(case, "largest_share/optimizer", even.optimizer, most, "bytes")
