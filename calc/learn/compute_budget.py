"""One compute budget by each published scaling law: the size and the tokens that each calls best."""

from __future__ import annotations

from typing import Final, get_args

from pydantic import BaseModel, ConfigDict, Field

from calc.errors import InputError
from calc.scaling import ScalingAnswer, ScalingPlan, scaling

SOURCE: Final = (
    "Chinchilla, arXiv 2203.15556, section 3; its re-fit, arXiv 2404.10102; Kaplan et al., arXiv 2001.08361, section 6"
)


class ComputeBudgetPlan(BaseModel):
    """FLOPs to train with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    training_flops: float = Field(
        5.76e23, ge=1e17, le=1e30, description="training FLOPs; Chinchilla and Gopher took 5.76e23"
    )


def compute_budget(plan: ComputeBudgetPlan) -> dict[str, ScalingAnswer]:
    """The answer of each fit by its name; fits that do not reach so far are left out."""
    found = {}
    for fit in get_args(ScalingPlan.model_fields["fit"].annotation):
        try:
            found[fit] = scaling(ScalingPlan(flops=int(plan.training_flops), fit=fit))
        except InputError:
            continue
    return found


def above_best(answer: ScalingAnswer) -> tuple[tuple[float, float], ...]:
    """Points (parameters, loss above the lowest of the same FLOPs), in nats a token; none where the fit has no loss."""
    known = [(point.params, point.loss) for point in answer.iso_flop if point.loss is not None]
    best = answer.optimum.loss
    return () if best is None else tuple((params, loss - best) for params, loss in known)
