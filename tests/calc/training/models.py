"""Models that the training tests share."""

from __future__ import annotations

from functools import cache

from calc.catalogue import load_config
from calc.model.config import from_config
from calc.model.spec import ModelSpec

GPT3_175B = {  # arXiv 2005.14165, table 2.1, with Megatron's padded vocabulary
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 12288,
    "n_layer": 96,
    "n_head": 96,
    "n_positions": 2048,
    "vocab_size": 51200,
}


@cache
def model(name: str) -> ModelSpec:
    return from_config(load_config(name), name)


@cache
def gpt3() -> ModelSpec:
    return from_config(GPT3_175B, "gpt3-175b")
