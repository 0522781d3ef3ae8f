"""Which links a group of ranks uses, and how long a collective takes on them.

Within an NVLink, xGMI or PCIe domain the measured tables answer. Between domains each GPU has a network card of its own: a ring or
a double tree pays NCCL's own latencies for each hop, and the slower of the two kinds of link bounds the bandwidth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from calc.communication.links import usual_links
from calc.hardware import Gpu
from calc.kernel_times import KernelTimes, kernel_times
from calc.kernel_times.times import Collective as Kind
from calc.kernel_times.times import Source
from calc.kernel_times.work import collective_bytes

# seconds, NVIDIA/nccl src/graph/tuning.cc (2.20 to 2.27), by protocol (LL, LL128, Simple): of a collective, and of each hop
_BASE_RING: Final = (6.6e-6, 14.0e-6, 8.4e-6)
_BASE_TREE: Final = (6.8e-6, 14.0e-6, 8.4e-6)
_HOP_RING_NVLINK: Final = (0.6e-6, 1.9e-6, 3.4e-6)
_HOP_TREE_NVLINK: Final = (0.6e-6, 1.25e-6, 4.0e-6)
_HOP_RING_NETWORK: Final = (2.7e-6, 4.0e-6, 14.0e-6)
_HOP_TREE_NETWORK: Final = (5.0e-6, 8.5e-6, 14.0e-6)
_SHARE_RING: Final = (0.5, 0.92, 1.0)  # of the bandwidth that each protocol leaves to data, the same file
_SHARE_TREE: Final = (1 / 3.8, 0.92 * 0.92, 0.92)
# share of a tree's bandwidth that all-reduces of medium sizes reach, by protocol, for each power of two from 64 bytes on (the same file)
_TREE_REACHED: Final = (
    (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
)
# a ring's latency in all-reduces between nodes by the Simple protocol grows so once each rank has 64 bytes for each of its channels (the
# same file; compute capability 8 and later), of which 16 are assumed
_RING_PLATEAU: Final = 1.4
_CHANNELS: Final = 16
# bytes/s of a node at most by the LL protocol, on two nodes and on more: between its figures for Intel's and AMD's hosts (the same file)
_MOST_LL: Final = (30e9, 20e9)
# what large all-reduces reach of the cards' bandwidth: 376.7 of 400 GB/s on 4 nodes of 8 B200 with 8 x 400 Gbit/s
# (stas00/ml-engineering, network/benchmarks/README.md)
NETWORK_SHARE: Final = 0.94


class Group(NamedTuple):
    """Ranks that communicate: how many, and how far apart (1: neighbours)."""

    name: str
    ranks: int
    stride: int


@dataclass(frozen=True, slots=True)
class Topology:
    """GPUs a node (or NVLink domain), the measured kernels within it, and bytes/s of one GPU's network card, one way."""

    times: KernelTimes
    gpus_per_node: int
    network_bandwidth: float

    def inside(self, ranks: int, stride: int = 1) -> int:
        """How many of so many ranks, `stride` apart, one node holds (ranks are numbered through a node before the next)."""
        return max(1, min(ranks, self.gpus_per_node // stride))

    def seconds(self, kind: Kind, size: float, ranks: int, stride: int = 1) -> float:
        """One collective of `ranks` GPUs, `stride` apart, or a message to the GPU `stride` ranks on.

        `size` in bytes as in `KernelTimes.collective`: the whole tensor, or the message.
        """
        return _seconds(self, kind, round(size), ranks, stride) if ranks > 1 and size else 0.0

    def exchange_once(self, size: float, copies: int, ranks: int, stride: int = 1) -> float:
        """One direction of an exchange that sends a token once to each rank, and once to each node, that has any of its `copies`
        experts (DeepEP, HybridEP: through the network to one GPU of a node, which passes it on). `size`: bytes of the rank's tokens."""
        inside = self.inside(ranks, stride)
        spread = size * _distinct(ranks, copies)
        if inside == ranks:
            return self.seconds("all_to_all", spread, ranks, stride)
        nodes = math.ceil(ranks / inside)
        away = size * _distinct(nodes, copies) * (nodes - 1) / nodes
        near = float(self.times.collective("all_to_all", max(1, round(spread)), inside)) if inside > 1 else 0.0
        return max(near, away / self._network + _BASE_RING[2] + _HOP_RING_NETWORK[2])

    def collective(self, kind: Kind, size: int, ranks: int, stride: int) -> float:
        """`seconds`, worked out."""
        inside = self.inside(ranks, stride)
        if kind == "send":
            across = stride >= self.gpus_per_node
            return self._message(size) if across else float(self.times.collective("send", size, 2))
        if inside == ranks:
            return float(self.times.collective(kind, size, ranks))
        if kind == "all_to_all":
            return self._all_to_all(size, ranks, inside)
        return self._ring_or_tree(kind, size, ranks, inside)

    def _message(self, size: int) -> float:
        return min(
            base + hop + size / (self._network * share)
            for base, hop, share in zip(_BASE_RING, _HOP_RING_NETWORK, _SHARE_RING, strict=True)
        )

    @property
    def _network(self) -> float:
        return self.network_bandwidth * NETWORK_SHARE

    def _all_to_all(self, size: int, ranks: int, inside: int) -> float:
        """Every rank sends a part to each other rank: those of other nodes through its card, one message after another started."""
        away = size * (ranks - inside) / ranks
        near = float(self.times.collective("all_to_all", max(1, size * inside // ranks), inside)) if inside > 1 else 0.0
        return max(near, away / self._network + _BASE_RING[2] + _HOP_RING_NETWORK[2])

    def _ring_or_tree(self, kind: Kind, size: int, ranks: int, inside: int) -> float:
        """The best of NCCL's algorithms and protocols by its own model. A ring crosses a node's border once for each card, and
        as many rings run as the node has ranks of the group; a tree (all-reduce alone) takes logarithmic hops."""
        nodes = math.ceil(ranks / inside)
        sent = float(collective_bytes(kind, size, ranks))
        network = sent / inside / self._network
        near = float(self.times.collective(kind, size, inside)) if inside > 1 else 0.0
        transfer = max(network, near)
        reduces = kind == "all_reduce"
        steps, crossings = (2 * (ranks - 1), 2 * nodes) if reduces else (ranks - 1, nodes)
        plateau = (1.0, 1.0, _RING_PLATEAU if reduces and size >= 64 * _CHANNELS * ranks else 1.0)
        slowest = (sent / _MOST_LL[nodes > 2], 0.0, 0.0)
        found = [
            slower * (base + (steps - min(steps, crossings)) * hop + min(steps, crossings) * hop_network)
            + max(transfer / share, least)
            for base, hop, hop_network, share, slower, least in zip(
                _BASE_RING, _HOP_RING_NVLINK, _HOP_RING_NETWORK, _SHARE_RING, plateau, slowest, strict=True
            )
        ]
        if reduces:
            found += [
                base
                + 2 * ((inside - 1) * hop + math.log2(nodes) * hop_network)
                + max(transfer / share, least) / _reached(size, reached)
                for base, hop, hop_network, share, reached, least in zip(
                    _BASE_TREE, _HOP_TREE_NVLINK, _HOP_TREE_NETWORK, _SHARE_TREE, _TREE_REACHED, slowest, strict=True
                )
            ]
        return float(np.min(found))


@lru_cache(maxsize=16384)
def _seconds(topology: Topology, kind: Kind, size: int, ranks: int, stride: int) -> float:
    return topology.collective(kind, size, ranks, stride)


def _reached(size: int, shares: tuple[float, ...]) -> float:
    """The share of its bandwidth that a tree reaches with a tensor of so many bytes."""
    place = max(0, (size // 64).bit_length() - 1)
    return shares[place] if place < len(shares) else 1.0


def _distinct(places: int, copies: int) -> float:
    """How many of so many equal places `copies` independent choices hit in expectation."""
    return places * (1 - (1 - 1 / places) ** copies)


def topology_of(
    gpu: Gpu, source: Source, gpus_per_node: int | None, intra_GBps: float | None, inter_GBps: float | None
) -> Topology:
    """The links that a user gives (GB/s, one way), or those usual around that GPU."""
    domain, rate, _ = usual_links(gpu)
    linked = replace(gpu, link_bandwidth=intra_GBps * 1e9) if intra_GBps is not None else gpu
    return Topology(kernel_times(linked, source), gpus_per_node or domain, (inter_GBps or rate) * 1e9)


def network_note(gpu: Gpu, topology: Topology, gpus: int, inter_GBps: float | None) -> tuple[str, ...]:
    """What was assumed of the network between nodes, where so many GPUs need one and none is given."""
    if gpus <= topology.gpus_per_node or inter_GBps is not None:
        return ()
    _, rate, source = usual_links(gpu)
    return (f"inter_GBps: {rate:g} GB/s a GPU between nodes of {topology.gpus_per_node}: {source}",)
