"""Norms, activations and position encodings: the parameters each adds to a model, and the matrix FLOPs of a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["norm", "activation", "position"]


class PartsByCostPlan(BaseModel):
    """The sizes that the costs depend on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_width: int = Field(4096, ge=1, le=2**17, description="h: numbers that a token is inside the model")
    mlp_width: int = Field(11008, ge=1, le=2**19, description="f: width inside the MLP")
    model_layers: int = Field(32, ge=1, le=10_000, description="L: layers, with two norms and one MLP each")
    positions: int = Field(4096, ge=1, le=2**24, description="positions that a learned encoding knows")
    heads: int = Field(32, ge=1, le=1024, description="query heads")


@dataclass(frozen=True, slots=True)
class Cost:
    """A choice, what it needs by its formula, its parameters in the model, its matrix FLOPs a token, and where it is from."""

    kind: Kind
    name: str
    formula: str
    parameters: int
    flops: int
    note: str
    source: str


def parts_by_cost(plan: PartsByCostPlan) -> tuple[Cost, ...]:
    """The choices one after another. FLOPs count matrix products alone: what else they compute is bound by memory."""
    h, f, layers = plan.model_width, plan.mlp_width, plan.model_layers
    norms = 2 * layers + 1
    plain, gated = 2 * h * f * layers, 3 * h * f * layers
    return (
        Cost(
            "norm",
            "LayerNorm",
            "2 h (2 L + 1)",
            2 * h * norms,
            0,
            "mean and deviation of each token",
            "arXiv 1607.06450",
        ),
        Cost("norm", "RMSNorm", "h (2 L + 1)", h * norms, 0, "no mean, no bias", "arXiv 1910.07467"),
        Cost(
            "norm", "DyT", "(2 h + 1) (2 L + 1)", (2 * h + 1) * norms, 0, "tanh in place of a norm", "arXiv 2503.10622"
        ),
        Cost("activation", "ReLU or GELU", "2 h f L", plain, 2 * plain, "two matrices", "arXiv 1606.08415"),
        Cost(
            "activation",
            "SwiGLU or GeGLU",
            "3 h f L",
            gated,
            2 * gated,
            "three matrices; f is often 8h/3",
            "arXiv 2002.05202",
        ),
        Cost(
            "position",
            "learned",
            "positions · h",
            plan.positions * h,
            0,
            "none beyond its positions",
            "arXiv 1810.04805",
        ),
        Cost("position", "sinusoidal", "0", 0, 0, "computed once", "arXiv 1706.03762"),
        Cost("position", "rotary (RoPE)", "0", 0, 0, "turns queries and keys in each layer", "arXiv 2104.09864"),
        Cost("position", "ALiBi", "0", 0, 0, "a slope for each head on the scores", "arXiv 2108.12409"),
        Cost("position", "T5 buckets", "32 heads", 32 * plan.heads, 0, "one table for all layers", "arXiv 1910.10683"),
    )
