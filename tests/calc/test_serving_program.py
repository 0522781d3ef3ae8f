"""The KV cache against the tensors that transformers' own caches hold after a real forward pass."""

from __future__ import annotations

import pytest

from calc.model.config import from_config
from calc.serving import ServingPlan, serve
from tests.calc.test_compute_program import PROGRAMS

pytestmark = pytest.mark.torch

_HYBRID = PROGRAMS["Qwen3MoeForCausalLM"][1] | {"num_hidden_layers": 4, "shared_expert_intermediate_size": 32}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
CACHES = PROGRAMS | {
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", _HYBRID | _DELTA),
    "MambaForCausalLM": (
        "MambaConfig",
        {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "state_size": 8},
    ),
}
BATCH = 2


def held_bytes(name: str, tokens: int) -> tuple[int, object]:
    """Bytes of the cache's tensors after a forward pass in bf16, and the spec of the same config."""
    import torch
    import transformers

    config_class, fields = CACHES[name]
    config = getattr(transformers, config_class)(**fields)
    config._experts_implementation = "eager"
    config._attn_implementation = "eager"
    model = getattr(transformers, name)(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        out = model(torch.ones(BATCH, tokens, dtype=torch.int64), use_cache=True)
    cache = getattr(out, "past_key_values", None) or out.cache_params
    tensors = {}
    for at, layer in enumerate(cache.layers):
        for key, value in vars(layer).items():
            found = value.values() if isinstance(value, dict) else [value]
            for tensor in found:
                if torch.is_tensor(tensor) and tensor.ndim > 0:
                    tensors[at, key, tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(tensors.values()), from_config(config.to_dict() | {"architectures": [name], "dtype": "bfloat16"})


@pytest.mark.parametrize("name", [name for name in CACHES if name != "DeepseekV4ForCausalLM"])
def test_the_cache_is_what_the_program_holds(name):
    """Once a window is full, transformers keeps W - 1 tokens of it between steps: the oldest is dropped before the next comes."""
    for tokens in (40, 100):
        held, spec = held_bytes(name, tokens)
        answer = serve(spec, ServingPlan(context=tokens, concurrency=BATCH))
        windows = [
            (count, kind.mixer)
            for kind, count in zip(spec.layers.kinds, spec.layers.counts, strict=True)
            if 0 < getattr(kind.mixer, "window", 0) <= tokens
        ]
        dropped = sum(count * 2 * mixer.num_key_value_heads * mixer.head_dim * 2 for count, mixer in windows)
        assert held == answer.kv_bytes - BATCH * dropped
        windowed = "sliding_window" in CACHES[name][1] or name == "ModernBertDecoderForCausalLM"  # by its class: 64
        assert bool(dropped) is (tokens > 64 and windowed)
