"""A model from a few sizes alone: a Llama-style decoder, with experts a Mixtral-style one."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from calc.errors import InputError
from calc.model.config import from_config
from calc.model.spec import ModelSpec


class BareModelPlan(BaseModel):
    """The sizes of a decoder with grouped-query attention and a SwiGLU MLP, its head not tied to the embedding."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int = Field(4096, ge=1, le=2**20, description="h: numbers that a token is inside the model")
    num_hidden_layers: int = Field(32, ge=1, le=10_000, description="L: layers")
    num_attention_heads: int = Field(32, ge=1, le=2**16, description="a: query heads; they divide h")
    num_key_value_heads: int = Field(
        8, ge=1, le=2**16, description="k: key and value heads; they divide the query heads"
    )
    intermediate_size: int = Field(
        14336, ge=1, le=2**22, description="f: width of the MLP, of each expert where there are any"
    )
    vocab_size: int = Field(128256, ge=1, le=2**24, description="V: tokens of the vocabulary")
    num_experts: int = Field(0, ge=0, le=4096, description="experts of each layer; 0 is a dense model")
    experts_per_token: int = Field(2, ge=1, le=4096, description="experts that one token is sent to")


def bare_model(plan: BareModelPlan) -> ModelSpec:
    """The spec of these sizes. InputError where they do not go together."""
    config: dict[str, Any] = plan.model_dump(exclude={"num_experts", "experts_per_token"})
    config |= {"model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": False}
    if plan.num_experts:
        if plan.experts_per_token > plan.num_experts:
            raise InputError.of(
                "experts_per_token", plan.experts_per_token, f"it must be at most num_experts ({plan.num_experts})"
            )
        config |= {
            "model_type": "mixtral",
            "num_local_experts": plan.num_experts,
            "num_experts_per_tok": plan.experts_per_token,
        }
    return from_config(config, "these sizes")
