"""Every layout of so many GPUs at once, as columns of numbers: which are valid, and about how fast and how large each is.

The estimates only choose which layouts are worked out exactly; they are in no answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np
import numpy.typing as npt

from calc.flops import token_flops
from calc.hardware import Gpu
from calc.kernel_times import kernel_times
from calc.model.feed_forward import MLP, MoE
from calc.model.spec import ModelSpec
from calc.planner.plan import SearchPlan
from calc.step_time.machine import half_rows, host_seconds, sustained
from calc.step_time.operations import end_parameters, layer_parameters
from calc.step_time.optimizer import HOST_ADAM

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

RECOMPUTE: Final = ("none", "selective", "full")
# which ZeRO stages and recomputations a program offers
_ZERO: Final = {"hf": (0, 1, 2, 3), "liger": (0, 1, 2, 3), "torchtitan": (3,), "fused": (1, 3)}
_AGAIN: Final = {"hf": (0, 2), "liger": (0, 2), "torchtitan": (0, 1, 2), "fused": (0, 2)}
OFFLOAD: Final = ("none", "optimizer")
# which programs keep the optimizer's states on the host
_HOST: Final = {"hf": (0, 1), "liger": (0, 1), "torchtitan": (0,), "fused": (0,)}
_LARGEST_MICRO_BATCH: Final = (64, 2**18)  # sequences, or more where they are short: tokens
_VIRTUAL: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12)
# bytes of a parameter's weight, gradient and states by recipe, as `calc.training` counts them
_STATES: Final = {
    "pure-bf16": (2, 2, 4), "amp": (4, 4, 8), "fp32": (4, 4, 8), "mixed-16": (2, 2, 12), "megatron-bf16": (2, 4, 12),
    "megatron-fp16": (2, 4, 12), "fsdp-bf16": (4, 4, 8), "fp8": (2, 4, 12),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Candidates:
    """Layouts as columns. `seconds` and `bytes` are the rough estimates by which they are tried."""

    columns: dict[str, Ints]
    seconds: Floats
    bytes: Floats
    considered: int
    rejected: dict[str, int]

    def __len__(self) -> int:
        return len(self.seconds)

    def row(self, index: int) -> dict[str, int]:
        """One layout's numbers by name."""
        return {name: int(values[index]) for name, values in self.columns.items()}


def divisors(number: int, most: int) -> list[int]:
    """The divisors of a number up to `most`."""
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]


def candidates(spec: ModelSpec, plan: SearchPlan, gpu: Gpu, counts: tuple[int, ...], domain: int) -> Candidates:
    """All layouts of the GPU counts, without those that break a rule or whose states alone are larger than the memory."""
    grid = _grid(spec, plan, counts, domain)
    considered = len(grid["tp"])
    rejected, left = _rules(spec, plan, grid)
    grid = {name: values[left] for name, values in grid.items()}
    states, whole = _bytes(spec, plan, grid)
    limit = gpu.memory_bytes or 0
    if limit:
        broken = states > limit
        hits = int(np.count_nonzero(broken))
        if hits:
            rejected["weights and states alone exceed the memory"] = hits
            grid = {name: values[~broken] for name, values in grid.items()}
            whole = whole[~broken]
    return Candidates(grid, _seconds(spec, plan, gpu, grid, domain), whole, considered, rejected)


_RANKS: Final = ("gpus", "tp", "pp", "cp", "dp")
_CHOICES: Final = ("ep", "micro_batch", "zero", "recompute", "virtual_stages", "within", "offload")


def _ranks(spec: ModelSpec, plan: SearchPlan, counts: tuple[int, ...], domain: int) -> Ints:
    """Every way to multiply tp, pp, cp and dp to one of the counts: a row each, in the order of `_RANKS`."""
    most_tp = min(domain, 64) if plan.implementation != "liger" else 1
    most_pp = min(spec.num_hidden_layers, 128) if plan.implementation in ("fused", "hf") else 1
    return np.array(
        [
            (gpus, tp, pp, cp, gpus // (tp * pp * cp))
            for gpus in counts
            for tp in divisors(gpus, most_tp)
            for pp in divisors(gpus // tp, most_pp)
            for cp in divisors(gpus // (tp * pp), 64)
            if cp & (cp - 1) == 0
        ],
        dtype=np.int64,
    )


def _choices(spec: ModelSpec, plan: SearchPlan) -> Ints:
    """Everything else that a layout chooses: a row each, in the order of `_CHOICES`. `within`: weights sharded within a domain (HSDP)."""
    experts, program = _experts(spec), plan.implementation
    shards = divisors(experts.num_experts, experts.num_experts) if experts else [1]
    micro = divisors(plan.global_batch, max(_LARGEST_MICRO_BATCH[0], _LARGEST_MICRO_BATCH[1] // plan.seq))
    virtual = _VIRTUAL if program in ("fused", "hf") else (1,)
    rows = product(shards, micro, _ZERO[program], _AGAIN[program], virtual, (0, 1), _HOST[program])
    return np.array(list(rows), dtype=np.int64)


def _grid(spec: ModelSpec, plan: SearchPlan, counts: tuple[int, ...], domain: int) -> dict[str, Ints]:
    """Every combination whose ranks multiply to the count; of micro-batches 1, and those that divide a rank's share of the batch."""
    ranks, choices = _ranks(spec, plan, counts, domain), _choices(spec, plan)
    outer = {name: ranks[:, [i]] for i, name in enumerate(_RANKS)}
    inner = {name: choices[None, :, i] for i, name in enumerate(_CHOICES)}
    alone = outer["dp"] * outer["cp"] == 1
    # data-parallel ranks of a domain, which HSDP shards over; it differs where several domains hold the same
    near = np.maximum(1, domain // (outer["tp"] * outer["cp"]))
    several = (outer["dp"] > near) & (outer["dp"] % near == 0) & (near * outer["cp"] > 1)
    kept = (inner["micro_batch"] == 1) | (plan.global_batch % (inner["micro_batch"] * outer["dp"]) == 0)
    kept &= (outer["pp"] > 1) | (inner["virtual_stages"] == 1)  # chunks without a pipeline are no other layout
    kept &= ~alone | (inner["zero"] == _ZERO[plan.implementation][0])  # nor is sharding over one rank
    kept &= (inner["within"] == 0) | ((inner["zero"] == 3) & several)
    kept &= (inner["offload"] == 0) | ((outer["pp"] == 1) & ((inner["zero"] >= 2) | alone))
    rows, columns = np.nonzero(kept)
    grid = {name: ranks[rows, i] for i, name in enumerate(_RANKS)}
    grid |= {name: choices[columns, i] for i, name in enumerate(_CHOICES)}
    hybrid = grid.pop("within") == 1
    grid["dp_replicate"] = np.where(hybrid, grid["dp"] // near[rows, 0], 1)
    return grid


def _rules(spec: ModelSpec, plan: SearchPlan, g: dict[str, Ints]) -> tuple[dict[str, int], npt.NDArray[np.bool_]]:
    """How many layouts break each rule, counted under the first that they break, and those that break none."""
    heads = [getattr(kind.mixer, "num_attention_heads", 0) for kind in spec.layers.kinds]
    kv = [getattr(kind.mixer, "num_key_value_heads", 0) for kind in spec.layers.kinds]
    widths = [_width(kind.feed_forward) for kind in spec.layers.kinds]
    batch = plan.global_batch
    per_step = g["micro_batch"] * g["dp"]
    m = batch // np.maximum(per_step, 1)
    parts = g["pp"] * g["virtual_stages"]
    tests: list[tuple[str, npt.NDArray[np.bool_]]] = [
        ("tp does not divide the heads, their groups or the feed-forward width", _uneven(g["tp"], heads, kv, widths)),
        ("cp (and tp, for sequence parallelism) does not divide the sequence", plan.seq % (g["cp"] * g["tp"]) != 0),
        ("a context-parallel rank would hold under 512 tokens", (g["cp"] > 1) & (plan.seq // g["cp"] < 512)),
        ("micro-batch x dp does not divide the global batch", batch % per_step != 0),
        ("ep does not divide dp x cp / dp_replicate", (g["dp"] * g["cp"] // g["dp_replicate"]) % g["ep"] != 0),
        ("more pipeline parts than layers", parts > spec.num_hidden_layers),
        (
            "layers do not divide into the virtual stages",
            (g["virtual_stages"] > 1) & (spec.num_hidden_layers % parts != 0),
        ),
        ("fewer micro-batches than pipeline stages", (g["pp"] > 1) & (m < g["pp"])),
        ("the program does not shard weights and pipeline them at once", (g["zero"] >= 2) & (g["pp"] > 1)),
    ]
    if plan.implementation == "torchtitan":
        tests.append(("torchtitan shards over more than one rank", g["dp"] * g["cp"] == 1))
    if plan.implementation == "liger":
        tests.append(("Liger-Kernel is modelled without expert parallelism", g["ep"] > 1))
    left = np.ones(len(g["tp"]), dtype=bool)
    found = {}
    for reason, broken in tests:
        hits = int(np.count_nonzero(broken & left))
        if hits:
            found[reason] = hits
            left &= ~broken
    return found, left


def _uneven(tp: Ints, heads: list[int], kv: list[int], widths: list[int]) -> npt.NDArray[np.bool_]:
    broken = np.zeros(len(tp), dtype=bool)
    for count in {*heads, *widths} - {0}:
        broken |= count % tp != 0
    for count in set(kv) - {0}:
        broken |= (count % tp != 0) & (tp % count != 0)
    return broken


def _width(feed: object) -> int:
    if isinstance(feed, MLP):
        return feed.intermediate_size
    return feed.expert.intermediate_size if isinstance(feed, MoE) else 0


def _experts(spec: ModelSpec) -> MoE | None:
    return next((kind.feed_forward for kind in spec.layers.kinds if isinstance(kind.feed_forward, MoE)), None)


def _parameters(spec: ModelSpec, g: dict[str, Ints]) -> tuple[Floats, Floats]:
    """Parameters of a middle rank: those of all data-parallel ranks, and experts."""
    plain = experts = 0
    for kind, count in zip(spec.layers.kinds, spec.layers.counts, strict=True):
        a, b = layer_parameters(kind, 1, 1)
        plain, experts = plain + count * a, experts + count * b
    ends = max(end_parameters(spec, 1))
    per_rank = (plain / g["pp"] + ends * (g["pp"] == 1)) / g["tp"]
    return per_rank, experts / (g["pp"] * g["tp"] * g["ep"])


def _bytes(spec: ModelSpec, plan: SearchPlan, g: dict[str, Ints]) -> tuple[Floats, Floats]:
    """Bytes of weights, gradients and states (a lower bound), and about how many with activations."""
    plain, experts = _parameters(spec, g)
    weight, gradient, state = _STATES[plan.used_recipe]
    states = np.zeros(len(g["tp"]))
    ranks = g["dp"] * g["cp"] // g["dp_replicate"]
    for count, shards in ((plain, ranks), (experts, np.maximum(1, ranks // g["ep"]))):
        for size, stage in ((weight, 3), (gradient, 2), (state, 1)):
            here = 1.0 - (stage == 1) * g["offload"]
            states += here * count * size / np.where(g["zero"] >= stage, shards, 1)
    tokens = g["micro_batch"] * plan.seq / (g["cp"] * g["tp"])
    held = np.where(
        g["recompute"] == 2, 2.0, np.where(g["recompute"] == 1, 0.4, 1.0) * _kept(spec, plan.implementation)
    )
    held = held * spec.hidden_size
    layers = spec.num_hidden_layers / g["pp"]
    flight = np.where(
        g["pp"] > 1, g["pp"] * (1 + (g["virtual_stages"] > 1) * (g["pp"] - 1) / (g["pp"] * g["virtual_stages"])), 1
    )
    logits = np.where(g["pp"] == 1, 10.0 * tokens * spec.vocab_size, 0.0)
    return states, states + tokens * layers * flight * held + logits


def _kept(spec: ModelSpec, implementation: str) -> float:
    """Bytes that a layer keeps for its backward, for each token and hidden feature."""
    kind = max(zip(spec.layers.counts, range(len(spec.layers.kinds)), strict=True))[1]
    layer = spec.layers.kinds[kind]
    feed = layer.feed_forward
    width = float(_width(feed))
    if isinstance(feed, MoE):
        width = width * feed.num_experts_per_tok + feed.hidden_size * feed.num_experts_per_tok * 0.7
    heads = getattr(layer.mixer, "num_attention_heads", 0) * getattr(layer.mixer, "head_dim", 0)
    h = spec.hidden_size
    of_hidden, of_width = {"fused": (8, 6), "torchtitan": (14, 6)}.get(implementation, (16, 8))
    return (of_hidden * h + 6 * heads + of_width * width) / h


def _seconds(spec: ModelSpec, plan: SearchPlan, gpu: Gpu, g: dict[str, Ints], domain: int) -> Floats:
    """About how long a step takes: products at one rate, the bubble, and collectives at the links' bandwidth."""
    if not len(g["tp"]):
        return np.zeros(0)
    one = token_flops(spec, plan.seq, causal=True)
    narrow = "fp8" if plan.matmul in ("fp8", "mxfp8", "fp8-block") or plan.used_recipe == "fp8" else "bf16"
    found = sustained(gpu, narrow)
    rate = found.tflops * 1e12 if found else 0.6 * (gpu.peak_flops(narrow) or gpu.peak_flops("fp16") or 1e14)
    again = np.select([g["recompute"] == 2, g["recompute"] == 1], [one.layers, 0.5 * one.layers], 0.0)
    tokens = plan.global_batch * plan.seq / g["gpus"]
    work = tokens * (3 * one.forward + again) / rate
    layers, experts = spec.num_hidden_layers, _experts(spec)
    if experts:  # few rows an expert slow its products
        rows = g["micro_batch"] * plan.seq / g["cp"] * experts.num_experts_per_tok * g["ep"] / experts.num_experts
        held = sum(weight.parameters for weight in experts.expert.weights)
        share = 2.0 * held * experts.num_experts_per_tok * layers / one.forward
        work = work * (1 + min(1.0, share) * half_rows(gpu)[0] * (2 if narrow == "fp8" else 1) / rows)
    even = np.ceil(layers / g["pp"]) * g["pp"] / layers
    m = plan.global_batch // (g["micro_batch"] * g["dp"])
    bubble = 1 + (g["pp"] - 1) / (g["virtual_stages"] * m)
    link = gpu.link_bandwidth or gpu.pcie_bandwidth or 16e9
    wire = (plan.inter_GBps or 50.0) * 1e9
    passed = tokens * 2.0 * spec.hidden_size * layers
    share = 0.25 if plan.implementation == "fused" else 1.0
    tensor = share * 12 * passed * (g["tp"] - 1) / g["tp"] / link
    speed = np.where(g["tp"] * g["ep"] <= domain, link, wire)
    copies = experts.num_experts_per_tok if experts else 0
    expert = 4 * passed * copies * (g["ep"] - 1) / g["ep"] / speed / g["tp"]
    plain, theirs = _parameters(spec, g)
    across = np.where(g["tp"] * g["cp"] * g["dp"] // g["dp_replicate"] <= domain, link, wire)
    repeats = np.where(g["zero"] == 3, m, 1)
    shared = (plain + theirs) * 6.0 * repeats / across
    states = 12.0 * (plain + theirs) / np.where(g["zero"] > 0, g["dp"] * g["cp"] // g["dp_replicate"], 1)
    shared += np.where(g["dp_replicate"] > 1, states * repeats / wire, 0.0)
    moved = g["offload"] * states * (4 / 12 / (gpu.pcie_bandwidth or 16e9) + HOST_ADAM / 12)
    data = 0.2 * shared + np.maximum(0.0, shared - np.where(g["zero"] == 3, work, work / m))
    small = work * 0.1 * (g["tp"] > 1) * np.log2(g["tp"])
    # launches by the host: some 80 a layer, and of Transformer Engine's experts 14 each in narrow formats and 6 in 16 bits
    each = (14 if narrow == "fp8" or plan.matmul == "nvfp4" else 6) if plan.implementation == "fused" else 0
    own = each * experts.num_experts / g["ep"] if experts else 0.0
    host = host_seconds(kernel_times(gpu)) * m * layers / g["pp"] * (80 + own)
    return np.asarray(np.maximum(work * even + small + tensor + expert, host) * bubble + data + moved)
