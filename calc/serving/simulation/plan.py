"""What to simulate: the serving plan, the requests that come, and how many replicas take them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from calc.serving.plan import MOST_TOKENS, ServingPlan

MOST_REQUESTS = 100_000


def _listed(value: Any) -> Any:
    """Numbers as a person pastes them, between commas, blanks or line ends."""
    if isinstance(value, str):
        return tuple(value.replace(",", " ").split()[: MOST_REQUESTS + 1])
    return value


_Lengths = Annotated[
    tuple[Annotated[int, Field(ge=1, le=2**24)], ...], BeforeValidator(_listed), Field(max_length=MOST_REQUESTS)
]
_Moments = Annotated[
    tuple[Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)], ...],
    BeforeValidator(_listed),
    Field(max_length=MOST_REQUESTS),
]


class SimulationPlan(ServingPlan):
    """A serving plan and the requests to run through it."""

    output: int = Field(256, ge=1, le=MOST_TOKENS, description="tokens to generate after the prompt")
    length_spread: float | None = Field(
        0.0,
        ge=0,
        lt=1,
        description="lengths are drawn evenly from 1 - spread to 1 of prompt and output; 0: all are equal",
    )
    requests: int = Field(1000, ge=1, le=MOST_REQUESTS, description="requests to run")
    arrivals: Literal["closed", "poisson", "list"] = Field(
        "closed",
        description="closed: each of the concurrent users sends the next when the last has ended; poisson: at a rate; list",
    )
    rate: float | None = Field(None, gt=0, le=1e6, description="requests a second, for poisson")
    arrival_times: _Moments = Field((), description="seconds of arrival, for list: numbers between commas or blanks")
    prompt_lengths: _Lengths = Field((), description="tokens of the prompts, taken in turn, instead of prompt")
    output_lengths: _Lengths = Field((), description="tokens of the outputs, taken in turn, instead of output")
    shared_prefix: int = Field(0, ge=0, le=2**24, description="first tokens that all prompts have in common, kept once")
    samples: int = Field(1, ge=1, le=1024, description="outputs made from each prompt, which share its blocks")
    seed: int = Field(0, ge=0, le=2**32, description="of the random arrivals and lengths")
    replicas: int = Field(1, ge=1, le=10_000, description="replicas that share the requests in turn")
    prefill_replicas: int = Field(
        0, ge=0, le=10_000, description="replicas that compute prompts alone and send the cache to the others; 0: none"
    )
    transfer_GBps: float = Field(
        50.0,
        gt=0,
        le=1e6,
        description="bandwidth over which a prompt's cache is sent (10**9 bytes/s); 50: one 400 Gb/s NIC",
    )
    target_ttft_s: float | None = Field(
        None, gt=0, le=1e6, description="95 % of requests must have their first token by then"
    )
    target_tpot_s: float | None = Field(
        None, gt=0, le=1e6, description="95 % of requests must get each further token so fast"
    )
    traffic: float | None = Field(
        None, gt=0, le=1e7, description="requests a second that a fleet must take within the targets"
    )

    @model_validator(mode="after")
    def _arrivals_are_given(self) -> SimulationPlan:
        if (self.arrivals == "poisson") != (self.rate is not None):
            raise ValueError(
                f"arrivals ({self.arrivals}) and rate ({self.rate}) go together: poisson needs a rate, others take none"
            )
        if (self.arrivals == "list") != bool(self.arrival_times):
            raise ValueError(
                f"arrivals ({self.arrivals}) and arrival_times ({len(self.arrival_times)} given) go together"
            )
        if self.prefill_replicas and self.arrivals == "closed":
            raise ValueError(f"prefill_replicas ({self.prefill_replicas}) needs arrivals poisson or list, not closed")
        if self.traffic is not None and self.target_ttft_s is None and self.target_tpot_s is None:
            raise ValueError(f"traffic ({self.traffic:g}) needs a target: target_ttft_s or target_tpot_s")
        if self.prefill_replicas and self.samples > 1:
            raise ValueError(
                f"prefill_replicas ({self.prefill_replicas}) take one sample a prompt, not samples {self.samples}"
            )
        return self
