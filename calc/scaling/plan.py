"""What a user asks of a scaling law."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from calc.quantities import whole_number

Amount = Annotated[int, BeforeValidator(whole_number)]


class ScalingPlan(BaseModel):
    """A budget, a size, or a number of tokens: the others are compute-optimal for it. Two of them give the third by C = 6 N D."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    flops: Amount = Field(0, ge=0, le=10**36, description="training FLOPs, such as 5.76e23; 0: not given")
    params: Amount = Field(0, ge=0, le=10**18, description="parameters, such as 70e9; 0: not given")
    tokens: Amount = Field(0, ge=0, le=10**20, description="training tokens, such as 1.4e12; 0: not given")
    fit: Literal["chinchilla", "chinchilla-refit", "chinchilla-1", "chinchilla-2", "kaplan", "data-constrained"] = (
        Field(
            "chinchilla",
            description="whose fit: Chinchilla's approach 3, its re-fit, approaches 1 and 2, Kaplan's, or with repeated data",
        )
    )
    unique_tokens: Amount = Field(
        0,
        ge=0,
        le=10**20,
        description="tokens that exist; those beyond are repeated and worth less; 0: as many as needed",
    )
    inference_tokens: Amount = Field(
        0,
        ge=0,
        le=10**22,
        description="tokens that the model will serve: the size that needs least in all for the same loss",
    )

    @model_validator(mode="after")
    def _rules(self) -> Self:
        given = [name for name in ("flops", "params", "tokens") if getattr(self, name)]
        if not given:
            raise ValueError("flops, params, tokens: none is given; one or two of them must be")
        if len(given) == 3:
            raise ValueError("flops, params, tokens: all three are given; the third follows from two by C = 6 N D")
        return self
