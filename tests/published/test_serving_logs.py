"""What public logs of serving engines say of the cache and the weights, held against the answer to the digit that they print."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from calc.catalogue import load
from calc.model.config import from_config
from calc.parameters import parameters
from calc.serving import ServingPlan, serve
from calc.units import GiB, MiB

ROWS = json.loads((Path(__file__).parent / "serving_logs.json").read_text(encoding="utf-8"))
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936, "tie_word_embeddings": True}

# the sizes of models that logs name and the catalogue may not have: their own config.json files
SIZES = {
    "phi-4": {"architectures": ["Phi3ForCausalLM"], "hidden_size": 5120, "intermediate_size": 17920}
    | {"num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352},
    "qwen2.5-1.5b": _QWEN2
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    | {"num_attention_heads": 12, "num_key_value_heads": 2},
    "qwen2-0.5b": _QWEN2
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    | {"num_attention_heads": 14, "num_key_value_heads": 2},
    "qwen2.5-3b": _QWEN2
    | {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36}
    | {"num_attention_heads": 16, "num_key_value_heads": 2},
    "qwen3-1.7b": {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144}
    | {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    | {"vocab_size": 151936, "tie_word_embeddings": True},
    "pythia-2.8b": {"architectures": ["GPTNeoXForCausalLM"], "hidden_size": 2560, "intermediate_size": 10240}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 50304, "tie_word_embeddings": False},
    "glm-4.7-flash": {"architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 2048, "intermediate_size": 10240}
    | {"num_hidden_layers": 47, "num_attention_heads": 20, "vocab_size": 154880, "moe_intermediate_size": 1536}
    | {"n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
    | {"q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256},
}


def named(*keys: str) -> list:
    """The rows that hold one of these keys."""
    return [pytest.param(row, id=row["id"]) for row in ROWS if any(key in row for key in keys)]


def spec_of(row):
    return from_config(SIZES[row["model"]]) if row["model"] in SIZES else load(row["model"])


def printed(row, key: str, unit: int) -> tuple[Fraction, Fraction]:
    """The bytes that print as the row's figure: half a last digit either way."""
    half = Fraction(1, 2 * 10 ** row.get("decimals", 1))
    return (Fraction(str(row[key])) - half) * unit, (Fraction(str(row[key])) + half) * unit


@pytest.mark.parametrize("row", named("blocks"))
def test_the_blocks_that_an_engine_logged_are_those_that_its_cache_holds(row):
    plan = ServingPlan(tp=row.get("tp", 1), block_size=row["block_size"])
    block = serve(spec_of(row), plan).kv_bytes_per_token * row["block_size"]
    low, high = printed(row, "cache_gib", GiB) if "cache_gib" in row else (row["cache_bytes"],) * 2
    assert low // block <= row["blocks"] <= high // block
    if low == high:
        assert row["blocks"] == low // block


@pytest.mark.parametrize("row", named("sequence_gib", "sequence_mib"))
def test_the_cache_of_one_sequence_is_the_logged_one(row):
    answer = serve(spec_of(row), ServingPlan(context=row["context"], kv_dtype="fp16"))
    if "sequence_mib" in row:
        assert answer.kv_bytes_per_sequence == row["sequence_mib"] * MiB
    else:
        low, high = printed(row, "sequence_gib", GiB)
        assert low <= answer.kv_bytes_per_sequence <= high


@pytest.mark.parametrize("row", named("weights"))
def test_a_gguf_file_is_as_large_as_published(row):
    spec = spec_of(row)
    answer = serve(spec, ServingPlan(weights=row["weights"]))
    if "bits_per_weight" in row:
        assert round(8 * answer.weights_bytes / parameters(spec).total, row["decimals"]) == row["bits_per_weight"]
    else:
        low, high = printed(row, "weights_mib", MiB)
        assert low <= answer.weights_bytes <= high
