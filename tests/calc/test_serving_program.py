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
        stored, spec = held_bytes(name, tokens)
        answer = serve(spec, ServingPlan(context=tokens, concurrency=BATCH))
        windows = [
            (count, kind.mixer)
            for kind, count in zip(spec.layers.kinds, spec.layers.counts, strict=True)
            if 0 < getattr(kind.mixer, "window", 0) <= tokens
        ]
        dropped = sum(count * 2 * mixer.num_key_value_heads * mixer.head_dim * 2 for count, mixer in windows)
        assert stored == answer.kv_bytes - BATCH * dropped
        windowed = "sliding_window" in CACHES[name][1] or name == "ModernBertDecoderForCausalLM"  # by its class: 64
        assert bool(dropped) is (tokens > 64 and windowed)


def test_a_decoder_keeps_the_encoders_keys_and_values_once():
    """T5: the cross attention's cache has the prompt's tokens, the decoder's own those that it made."""
    import torch
    import transformers

    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, vocab_size=96)
    config.decoder_start_token_id = 0
    model = transformers.T5ForConditionalGeneration(config).to(torch.bfloat16).eval()
    prompt, made = 24, 10
    with torch.no_grad():
        out = model(
            input_ids=torch.ones(BATCH, prompt, dtype=torch.int64),
            decoder_input_ids=torch.ones(BATCH, made, dtype=torch.int64),
            use_cache=True,
        )
    caches = (out.past_key_values.self_attention_cache, out.past_key_values.cross_attention_cache)
    stored = [
        sum(t.numel() * t.element_size() for layer in each.layers for t in (layer.keys, layer.values))
        for each in caches
    ]
    named = {"architectures": ["T5ForConditionalGeneration"], "dtype": "bfloat16"}
    spec = from_config(config.to_dict() | named)
    answer = serve(spec, ServingPlan(context=prompt + made, prompt=prompt, concurrency=BATCH))
    assert stored[0] == BATCH * made * answer.kv_bytes_per_token
    assert stored[1] == BATCH * answer.kv_fixed_bytes


@pytest.mark.parametrize("kept", ["fp8", "int8", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_a_quantised_cache_is_as_large_as_the_real_one_quantised(kept):
    """The tensors of a real cache, cast or packed by torch and by gguf."""
    import torch
    import transformers
    from gguf import GGMLQuantizationType, quants

    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        cache = model(torch.ones(BATCH, 40, dtype=torch.int64), use_cache=True).past_key_values
    stored = 0
    for tensor in (tensor for layer in cache.layers for tensor in (layer.keys, layer.values)):
        if kept in ("fp8", "int8"):
            stored += tensor.to(torch.float8_e4m3fn if kept == "fp8" else torch.int8).nbytes
        else:
            stored += quants.quantize(tensor.float().numpy(), GGMLQuantizationType[kept.upper()]).nbytes
    spec = from_config(config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"})
    assert stored == serve(spec, ServingPlan(context=40, concurrency=BATCH, kv_dtype=kept)).kv_bytes
