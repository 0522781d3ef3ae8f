"""LoRA: two thin matrices next to a frozen one."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from calc.breakdown import Breakdown, Component, Formula
from calc.errors import InputError

_LORA: Final = ("LoRA, arXiv 2106.09685, section 4.1", "https://arxiv.org/abs/2106.09685")


class LowRankPlan(BaseModel):
    """A weight of d rows and k columns, with an adapter of rank r."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    matrix_rows: int = Field(4096, ge=1, le=2**20, description="d: numbers that the layer gives")
    matrix_columns: int = Field(4096, ge=1, le=2**20, description="k: numbers that the layer takes")
    adapter_rank: int = Field(8, ge=1, le=2**16, description="r: rank of the change that is learnt")


def frozen(plan: LowRankPlan) -> int:
    """Parameters of the weight itself."""
    return plan.matrix_rows * plan.matrix_columns


def adapter(plan: LowRankPlan) -> Breakdown:
    """Parameters of the adapter, B (d x r) and A (r x k). InputError for a rank above both sides, which saves nothing."""
    rows, columns, rank = plan.matrix_rows, plan.matrix_columns, plan.adapter_rank
    if rank > min(rows, columns):
        raise InputError.of("adapter_rank", rank, f"the matrix has no more than rank {min(rows, columns)}")
    parts = (
        Component("B", rank * rows, formula=Formula(r"<d> \cdot <r>", *_LORA), numbers={"d": rows, "r": rank}),
        Component("A", rank * columns, formula=Formula(r"<r> \cdot <k>", *_LORA), numbers={"r": rank, "k": columns}),
    )
    return Breakdown(Component("adapter", children=parts), "parameters")
