"""What a user says when asking for a layout: the run, the GPUs, and by what to rank."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from calc.errors import InputError
from calc.quantities import left_out, whole_number
from calc.step_time.plan import Format, TimePlan

Recipe = Literal["pure-bf16", "amp", "fp32", "mixed-16", "megatron-bf16", "megatron-fp16", "fsdp-bf16", "fp8"]
Implementation = Literal["hf", "liger", "torchtitan", "fused"]
assert set(get_args(Implementation)) <= set(get_args(TimePlan.model_fields["implementation"].annotation))


class SearchPlan(BaseModel):
    """A run whose layout is asked for.

    Without `gpus` counts up to `most_gpus` are tried: a deadline or a budget says which will do.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus: int | None = Field(
        None, ge=1, le=100_000, description="number of GPUs; left out: as many as deadline and budget ask for"
    )
    most_gpus: int = Field(4096, ge=1, le=100_000, description="the most GPUs to try where their number is left open")
    gpus_per_node: int | None = Field(
        None, ge=1, le=1024, description="GPUs of one NVLink or PCIe domain; left out: the usual number of that GPU"
    )
    inter_GBps: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="network of one GPU between domains, one way, in GB/s; left out: the usual NIC's",
    )
    seq: int = Field(4096, ge=1, le=2**24, description="sequence length in tokens")
    global_batch: int = Field(1024, ge=1, le=2**30, description="sequences in one optimizer step")
    recipe: Recipe | None = Field(
        None, description="number formats of weights, gradients and states; left out: the program's usual ones"
    )
    matmul: Format | None = Field(
        None, description="number format of the layers' matrix products; left out: the recipe's"
    )
    implementation: Implementation = Field("fused", description="whose program, as for train")
    limit: int = Field(10, ge=1, le=1000, description="layouts to show")
    sort: Literal["time", "memory", "cost"] = Field("time", description="what to rank by")
    tokens: Annotated[int | None, BeforeValidator(left_out), BeforeValidator(whole_number)] = Field(
        None, ge=1, le=10**18, description="tokens of the whole run, such as 2e12 or 1T; left out: one step"
    )
    deadline_hours: float | None = Field(None, gt=0, le=1e7, description="hours that the run may take")
    budget: float | None = Field(
        None, gt=0, le=1e13, description="money that the run may cost, in the price's currency"
    )
    price_per_gpu_hour: float | None = Field(
        None,
        ge=0,
        le=1e6,
        description="price of a GPU-hour; left out: a dated public price of that GPU, where there is one",
    )

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.gpus is None and self.deadline_hours is None and self.budget is None:
            raise InputError("gpus: give it, or deadline_hours or budget from which it follows", "gpus")
        if (self.deadline_hours is not None or self.budget is not None) and not self.tokens:
            raise InputError(
                "tokens: a deadline or a budget is for a whole run; give its tokens, such as 2e12", "tokens"
            )
        return self

    @property
    def used_recipe(self) -> Recipe:
        """The recipe, or the program's own."""
        if self.recipe is not None:
            return self.recipe
        usual: dict[str, Recipe] = {"fused": "megatron-bf16", "torchtitan": "fsdp-bf16"}
        return usual.get(self.implementation, "pure-bf16")
