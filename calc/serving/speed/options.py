"""What the speed of serving is asked for: the traffic, the scheduling, the draft, and whose kernel times."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Times = Literal["measured", "calibrated", "roofline"]
Batching = Literal["continuous", "static"]


class SpeedOptions(BaseModel):
    """The options of a serving plan that change seconds and no bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    times: Times | None = Field(
        None,
        description="whose times: measured kernels of that GPU or its nearest relative, your own measurements (calibrated), or the "
        "ideal roofline; left out: measured",
    )
    length_spread: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="lengths are drawn evenly from 1 - spread to 1 of prompt and output; 0: all are equal; left out: not known, "
        "so prompt and output are means, and times lie between those of equal lengths and of 0.2",
    )
    rounds: int = Field(
        10,
        ge=0,
        le=10**9,
        description="requests that each user sends one after another; all first ones arrive at once. 0: a steady stream, spread evenly",
    )
    cached_prompt: int = Field(0, ge=0, le=2**24, description="prompt tokens found in the prefix cache")
    repeated_prompts: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the requests after the first round whose whole prompt is in the prefix cache",
    )
    batching: Batching = Field("continuous", description="static: a batch waits until its last sequence has ended")
    draft_tokens: int = Field(
        0, ge=0, le=64, description="speculative decoding: tokens drafted for each step, checked at once"
    )
    draft_acceptance: float = Field(
        0.8,
        ge=0,
        lt=1,
        description="share of drafted tokens accepted, each if those before were (DeepSeek-V3's own: 0.85 to 0.9)",
    )
    poll_steps: int = Field(
        1, ge=1, le=10_000, description="SGLang's --scheduler-recv-interval: steps between two checks for new requests"
    )
    stream_steps: int = Field(
        1, ge=1, le=10_000, description="TensorRT-LLM's stream_interval: steps whose tokens go to the client together"
    )
    gather_steps: int = Field(
        0,
        ge=0,
        le=10_000,
        description="TensorRT-LLM's timeout_iters: steps that prompts wait so that all data-parallel ranks get one",
    )
    moe_backend: Literal["auto", "trtllm", "deepgemm"] = Field(
        "auto",
        description="TensorRT-LLM's moe_config.backend for experts in FP8 blocks on Blackwell; auto: trtllm, as from 1.3 on",
    )
    price_per_gpu_hour: float | None = Field(
        None, gt=0, le=1e6, description="price of one GPU for an hour, any currency"
    )

    @property
    def mean_length(self) -> float:
        """The mean of the lengths, as a share of prompt and output."""
        return 1 - (self.length_spread or 0.0) / 2

    @property
    def tokens_a_step(self) -> float:
        """Tokens that a sequence makes in one step, in expectation: 1 + a + ... + a^k (Leviathan et al., arXiv 2211.17192, eq. 1)."""
        accepted = self.draft_acceptance
        return (1 - accepted ** (self.draft_tokens + 1)) / (1 - accepted)
