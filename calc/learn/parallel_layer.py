"""A decoder layer on several ranks: what tensor, sequence and expert parallelism leave on each, and what they send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from calc.errors import InputError
from calc.units import ceil_div

SOURCE: Final = (
    "Megatron-LM, arXiv 1909.08053, section 3; sequence parallelism, arXiv 2205.05198, section 4.2.2; "
    "GShard (experts), arXiv 2006.16668"
)
_BYTES: Final = 2  # of a number in 16 bits


class ParallelLayerPlan(BaseModel):
    """A layer with a gated MLP, or with experts of that width, split over ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layer_hidden: int = Field(4096, ge=1, le=2**17, description="h: numbers that a token is inside the model")
    layer_heads: int = Field(32, ge=1, le=1024, description="a: query heads; they divide h")
    layer_kv_heads: int = Field(8, ge=1, le=1024, description="k: key and value heads")
    layer_width: int = Field(14336, ge=1, le=2**19, description="f: width of the MLP or of each expert")
    layer_tokens: int = Field(
        8192, ge=1, le=2**22, description="tokens of a micro-batch: sequence length times sequences"
    )
    tensor_ranks: int = Field(4, ge=1, le=64, description="t: ranks that split each matrix")
    split_norms: bool = Field(True, description="sequence parallelism: norms and residuals split over the same ranks")
    layer_experts: int = Field(0, ge=0, le=1024, description="experts of the layer; 0: a dense MLP")
    chosen_experts: int = Field(2, ge=1, le=64, description="K: experts that a token is sent to")
    expert_ranks: int = Field(1, ge=1, le=256, description="e: ranks over which whole experts are spread")


@dataclass(frozen=True, slots=True)
class Piece:
    """An operation on one rank: the shape of its weight there, its parameters, and the numbers of a micro-batch that it gives."""

    name: str
    shape: tuple[int, ...]
    parameters: int
    output: int


@dataclass(frozen=True, slots=True)
class Sent:
    """A collective of forward and backward together: calls, and the bytes that one rank sends."""

    name: str
    ranks: int
    calls: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ParallelLayer:
    """One rank's share of the layer."""

    pieces: tuple[Piece, ...]
    sent: tuple[Sent, ...]

    @property
    def parameters(self) -> int:
        """Parameters on one rank."""
        return sum(piece.parameters for piece in self.pieces)


def parallel_layer(plan: ParallelLayerPlan) -> ParallelLayer:
    """The layer on one rank. InputError where ranks do not divide what they split."""
    _check(plan)
    hidden, ranks, tokens = plan.layer_hidden, plan.tensor_ranks, plan.layer_tokens
    head = hidden // plan.layer_heads
    queries = hidden // ranks
    keys = max(1, plan.layer_kv_heads // ranks) * head  # fewer heads than ranks are copied
    inside = tokens // ranks if plan.split_norms else tokens
    experts = plan.layer_experts // plan.expert_ranks
    width = plan.layer_width // ranks
    routed = tokens * plan.chosen_experts if plan.layer_experts else tokens
    copies = experts or 1
    pieces = [
        _piece("norm before attention", (hidden,), inside * hidden),
        _piece("query, key and value", (hidden, queries + 2 * keys), tokens * (queries + 2 * keys)),
        _piece("output of attention", (queries, hidden), inside * hidden),
        _piece("norm before the MLP", (hidden,), inside * hidden),
    ]
    if plan.layer_experts:
        pieces.append(_piece("router", (hidden, plan.layer_experts), inside * plan.layer_experts))
    stack = (copies,) if plan.layer_experts else ()
    pieces += [
        _piece("gate and up", (*stack, hidden, 2 * width), routed * 2 * width),
        _piece("down", (*stack, width, hidden), inside * hidden),
    ]
    return ParallelLayer(tuple(pieces), tuple(_sent(plan)))


def _check(plan: ParallelLayerPlan) -> None:
    for name, value, ranks in (
        ("layer_heads", plan.layer_heads, plan.tensor_ranks),
        ("layer_width", plan.layer_width, plan.tensor_ranks),
        ("layer_hidden", plan.layer_hidden, plan.layer_heads),
        ("layer_experts", plan.layer_experts, plan.expert_ranks),
    ):
        if value % ranks:
            raise InputError.of(name, value, f"it must be a multiple of {ranks}")
    if plan.split_norms and plan.layer_tokens % plan.tensor_ranks:
        raise InputError.of("layer_tokens", plan.layer_tokens, f"it must be a multiple of {plan.tensor_ranks}")
    if plan.layer_experts and plan.chosen_experts > plan.layer_experts:
        raise InputError.of("chosen_experts", plan.chosen_experts, f"it must be at most {plan.layer_experts}")


def _piece(name: str, shape: tuple[int, ...], output: int) -> Piece:
    parameters = 1
    for side in shape:
        parameters *= side
    return Piece(name, shape, parameters, output)


def _sent(plan: ParallelLayerPlan) -> list[Sent]:
    """Tensor parallelism adds up twice in each direction; a ring all-reduce is a reduce-scatter and an all-gather."""
    full = _BYTES * plan.layer_tokens * plan.layer_hidden
    ranks, found = plan.tensor_ranks, []
    if ranks > 1:
        once = ceil_div(full * (ranks - 1), ranks)
        if plan.split_norms:
            found += [Sent("all-gather", ranks, 4, 4 * once), Sent("reduce-scatter", ranks, 4, 4 * once)]
        else:
            found.append(Sent("all-reduce", ranks, 4, 4 * 2 * once))
    if plan.layer_experts and plan.expert_ranks > 1:
        moved = ceil_div(full * plan.chosen_experts * (plan.expert_ranks - 1), plan.expert_ranks)
        found.append(Sent("all-to-all", plan.expert_ranks, 4, 4 * moved))
    return found
