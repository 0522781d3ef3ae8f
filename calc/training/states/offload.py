"""Offloading: which states leave the device, what lies in host memory and on NVMe, and what one step moves between them.

ZeRO-Offload leaves the weights on the device and updates them on the host; ZeRO-Infinity leaves nothing there but the layers that
run, and may keep all of it on NVMe. Host and NVMe bytes are exact and those of one rank; pinned buffers are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

from calc.breakdown import Breakdown, Component, Formula, Number
from calc.hardware import Gpu
from calc.training.plan import TrainingPlan
from calc.training.states.recipes import RECIPES
from calc.training.states.sharding import GROUPS, Placed, StateKey, state_components
from calc.training.states.tensors import Tensors

AWAY: Final = {
    "none": (),
    "optimizer": ("gradients", "optimizer"),
    "parameters": GROUPS,
}  # groups that are not on the device
NVME_GBPS = 1.6  # of one GPU of a DGX-2 node (ZeRO-Infinity, figure 2b)

_OFFLOAD = ("ZeRO-Offload, arXiv 2101.06840, sections 3 and 4", "https://arxiv.org/abs/2101.06840")
_INFINITY = ("ZeRO-Infinity, arXiv 2104.07857, sections 3 and 4", "https://arxiv.org/abs/2104.07857")
_LETTERS = (
    "w, g, o: bytes of this rank's weights, gradients and optimizer state; u: weights that it updates; m: micro-batches of one step",
    "l: loads of the weights for a micro-batch: forward, backward, and one more for recomputation",
)
NOTES: Final = {
    "none": (),
    "optimizer": (
        "offload: the host updates the weights; each layer's gradients leave while backward runs the layer below it",
        "offload: where the recipe has no master weights, the host holds a copy of the weights to update",
    ),
    "parameters": (
        "offload: a layer's weights are on the device while it runs, and the next one's; embedding, final norm and head all through",
    ),
}


def resident(plan: TrainingPlan) -> tuple[str, ...]:
    """The groups of states that stay on the device."""
    return tuple(group for group in GROUPS if group not in AWAY[plan.offload])


class Traffic(NamedTuple):
    """Bytes that one rank moves in one optimizer step."""

    to_device: int
    to_host: int
    nvme_read: int
    nvme_written: int


@dataclass(frozen=True, eq=False)
class Offloaded:
    """What one rank keeps away from its device, and moves. `states` is tensor by tensor, `moved` a leaf for each way."""

    plan: TrainingPlan
    states: Breakdown
    moved: Breakdown

    @property
    def host_bytes(self) -> int:
        return 0 if self.plan.nvme else int(self.states.total)

    @property
    def nvme_bytes(self) -> int:
        return int(self.states.total) if self.plan.nvme else 0

    @cached_property
    def traffic(self) -> Traffic:
        return Traffic(**{row.path: int(row.value) for row in self.moved.rows()})

    def seconds(self, gpu: Gpu | None) -> float | None:
        """Seconds of the transfers between device and host, one way after the other and while nothing is computed; None if unknown."""
        if gpu is None or not gpu.pcie_bandwidth:
            return None if self.plan.offload != "none" else 0.0
        return (self.traffic.to_device + self.traffic.to_host) / gpu.pcie_bandwidth

    @property
    def nvme_seconds(self) -> float:
        """Seconds of what is read from NVMe and written there."""
        rate = 1e9 * (NVME_GBPS if self.plan.nvme_GBps is None else self.plan.nvme_GBps)
        return (self.traffic.nvme_read + self.traffic.nvme_written) / rate

    def as_json(self, gpu: Gpu | None) -> dict[str, Any]:
        return {
            "host_bytes": self.host_bytes,
            "nvme_bytes": self.nvme_bytes,
            "transfer_bytes": self.traffic._asdict(),
            "transfer_seconds": self.seconds(gpu),
            "nvme_seconds": self.nvme_seconds,
            "offloaded": self.states.components(),
            "transfers": self.moved.components(),
        }


def offloaded(plan: TrainingPlan, groups: tuple[Placed, ...], key: StateKey) -> Offloaded:
    """What a device with those groups keeps away, by DeepSpeed's scheme: each rank updates its own part of the weights."""
    exact = key._replace(granule=1, counters=False)
    own = exact._replace(zero=3)  # the part of the weights that this rank updates
    states = list(state_components(groups, exact, AWAY[plan.offload])) if AWAY[plan.offload] else []
    weights = state_components(groups, own, ("parameters",)) if plan.offload == "parameters" else ()
    trained = tuple((_trained(tensors), count) for tensors, count in groups)
    updated = state_components(trained, own, ("parameters",)) if plan.offload != "none" else ()
    master = any(state.name == "master" for state in RECIPES[plan.recipe].states)
    if plan.offload == "optimizer" and not master:
        states += [Component("weights_copy", children=part.children) for part in updated]
    sizes = {part.name: int(part.total) for part in states}
    numbers = {
        "w": int(sum(part.total for part in weights)),
        "u": int(sum(part.total for part in updated)),
        "g": sizes.get("gradients", 0),
        "o": sizes.get("optimizer", 0),
        "m": plan.microbatches,
        "l": 1 + plan.reshard_after_forward + (plan.recompute == "full"),
    }
    moved = tuple(_leaf(plan, name, numbers) for name in Traffic._fields)
    return Offloaded(
        plan,
        Breakdown(Component("", children=tuple(states)), "bytes"),
        Breakdown(Component("", children=moved), "bytes"),
    )


@lru_cache(maxsize=256)
def _trained(tensors: Tensors) -> Tensors:
    """The tensors of a group that train. Cached: a group hashes by identity."""
    return Tensors(tensors.path, tuple(tensor for tensor in tensors.tensors if not tensor.frozen))


# What moves each way: letters whose product is one term. Weights alone come back where the optimizer alone is away.
_TERMS: Final = {
    ("optimizer", "to_device"): ("u",),
    ("optimizer", "to_host"): ("mg",),
    ("optimizer", "nvme_read"): ("g", "o"),
    ("optimizer", "nvme_written"): ("mg", "o"),
    ("parameters", "to_device"): ("mlw",),
    ("parameters", "to_host"): ("mg",),
    ("parameters", "nvme_read"): ("mlw", "g", "o"),
    ("parameters", "nvme_written"): ("mg", "o", "u"),
}


def _leaf(plan: TrainingPlan, name: str, numbers: dict[str, int]) -> Component:
    """One way of the traffic: a sum of products."""
    terms = _TERMS.get((plan.offload, name), ()) if plan.nvme or not name.startswith("nvme") else ()
    value = 0
    for term in terms:
        product = 1
        for letter in term:
            product *= numbers[letter]
        value += product
    latex = " + ".join(r" \cdot ".join(f"<{letter}>" for letter in term) for term in terms) or "0"
    used: dict[str, Number] = {letter: numbers[letter] for letter in dict.fromkeys("".join(terms))}
    source, url = _OFFLOAD if plan.offload == "optimizer" and not plan.nvme else _INFINITY
    return Component(name, value, formula=Formula(latex, source, url, _LETTERS), numbers=used)
