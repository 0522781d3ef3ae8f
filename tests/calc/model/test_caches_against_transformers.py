"""Every kind of cache of transformers, filled for real: static and sliding ones to the byte, what is kept past a window, the caches
of MiniMax, RecurrentGemma and DeepSeek-V4, and those of models that see."""

from __future__ import annotations

from typing import Any

import pytest

from calc.model.config import from_config
from calc.model.spec import ModelSpec
from calc.serving.cache import Kept, cache_of, kept_tensors
from calc.serving.plan import ServingPlan
from tests.calc.model.test_state_against_transformers import EXPERTS, FAMILIES, SIZES

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

PROMPT, CONTEXT, WINDOW = 12, 24, 8
WINDOWED = {
    "Llama4ForCausalLM": "attention_chunk_size",
    "ModernBertDecoderForCausalLM": "local_attention",
}  # other names
GEMMA3N = {"num_kv_shared_layers": 0, "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4}
GEMMA3N |= {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 4, "sliding_window": WINDOW}
OWN = {"xLSTMForCausalLM"}  # its class takes no other cache than its own
TINY = {name: more for name, more in FAMILIES.items() if name not in OWN} | {"Gemma3nForCausalLM": GEMMA3N}


def _config(name: str, more: dict[str, Any], window: bool = True) -> Any:
    """The config of a tiny model, its window short enough to be filled."""
    import transformers

    config_class = getattr(transformers, name).config_class
    fields = {key: value for key, value in (SIZES | more).items() if value is not None}
    key = WINDOWED.get(name, "sliding_window")
    if window and getattr(config_class(**fields), key, None):
        fields[key] = WINDOW
    return config_class(**fields)


def _model(name: str, config: Any) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, name)(config).to(torch.bfloat16).eval()


def _spec(name: str, config: Any) -> ModelSpec:
    return from_config(config.to_dict() | {"architectures": [name], "torch_dtype": "bfloat16"})


def _tokens(count: int, first: int = 3) -> Any:
    import torch

    return (torch.arange(first, first + count) % 90 + 3)[None]


def _run(model: Any, ids: Any, cache: Any, **given: Any) -> Any:
    import torch

    name = "cache_params" if "cache_params" in model.forward.__code__.co_varnames else "cache"
    with torch.no_grad():
        return model(ids, use_cache=True, **{name: cache}, **given)


def _tensors(layer: Any) -> dict[int, Any]:
    """The tensors that a layer of the cache holds, each storage once."""
    import torch

    found = {}
    for value in vars(layer).values():
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        found |= {
            each.data_ptr(): each
            for each in inner
            if isinstance(each, torch.Tensor) and each.dim() > 1 and each.numel()
        }
    return found


def _bytes(layer: Any) -> int:
    return sum(each.numel() * each.element_size() for each in _tensors(layer).values())


def _elements(kind: tuple[Kept, ...], tokens: int, short: int = 0) -> int:
    """What a layer keeps after so many tokens; `short`: how many less than its window a full one holds."""
    kept = ((one.most - short if one.most and tokens >= one.most else tokens, one) for one in kind)
    return sum(one.elements * (1 if one.fixed else cached // one.every) for cached, one in kept)


@pytest.mark.parametrize("name", TINY)
def test_a_static_cache_has_the_predicted_bytes_windows_and_states_included(name):
    from transformers import StaticCache

    config = _config(name, TINY[name])
    cache = StaticCache(config=config, max_cache_len=CONTEXT)
    _run(_model(name, config), _tokens(PROMPT), cache)
    spec = _spec(name, config)
    predicted = cache_of(spec, ServingPlan(context=CONTEXT))
    assert predicted.sequence_bytes(spec.layers.counts, CONTEXT) == sum(map(_bytes, cache.layers))
    slope, fixed = predicted.token_bytes(spec.layers.counts), predicted.fixed_bytes(spec.layers.counts)
    assert fixed + slope * CONTEXT == sum(map(_bytes, cache.layers))  # every window is full at this length


SLIDING = ["Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma4ForCausalLM", "GptOssForCausalLM", "Llama4ForCausalLM"]
SLIDING += ["MistralForCausalLM", "Gemma3nForCausalLM"]


@pytest.mark.parametrize("name", SLIDING)
def test_past_its_window_a_dynamic_cache_holds_the_window_less_the_next_token(name):
    from transformers import DynamicCache

    config = _config(name, TINY[name])
    spec = _spec(name, config)
    model, cache = _model(name, config), DynamicCache(config=config)
    kinds = kept_tensors(spec, 1, 0, 0, False)
    assert any(one.most == WINDOW for kind in kinds for one in kind)
    seen = 0
    for count in (WINDOW - 3, 1, 1, 1, PROMPT, 1):  # up to the window token by token, then far past it
        _run(model, _tokens(count, seen), cache)
        seen += count
        predicted = [2 * _elements(kinds[at], seen, short=1) for at in spec.layers.pattern]
        assert predicted == [_bytes(layer) for layer in cache.layers]


def test_the_last_layers_of_gemma_3n_keep_nothing_of_their_own():
    from transformers import StaticCache

    shared = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    config = _config("Gemma3nForCausalLM", GEMMA3N | shared)
    cache = StaticCache(config=config, max_cache_len=CONTEXT)
    _run(_model("Gemma3nForCausalLM", config), _tokens(PROMPT), cache)
    spec = _spec("Gemma3nForCausalLM", config)
    kinds = kept_tensors(spec, 1, 0, 0, False)
    predicted = [2 * _elements(kinds[at], CONTEXT) for at in spec.layers.pattern]
    assert predicted[2:] == [0, 0]
    assert predicted[:2] == [_bytes(layer) for layer in cache.layers[:2]]
    assert sum(predicted) == sum(map(_bytes, cache.layers))


def test_minimax_keeps_a_square_a_head_where_its_attention_is_linear():
    import torch

    config = _config(
        "MiniMaxForCausalLM", EXPERTS | {"layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 4}
    )
    cache = _run(_model("MiniMaxForCausalLM", config), _tokens(PROMPT), None).cache
    spec = _spec("MiniMaxForCausalLM", config)
    kinds = kept_tensors(spec, 1, 0, 0, False)
    squares = [each.numel() if isinstance(each, torch.Tensor) else 0 for each in cache.linear_cache] + [0]
    cached = [2 * square + _bytes(layer) for square, layer in zip(squares, cache.layers, strict=True)]
    assert [2 * _elements(kinds[at], PROMPT) for at in spec.layers.pattern] == cached
    predicted = cache_of(spec, ServingPlan(context=PROMPT))
    assert predicted.sequence_bytes(spec.layers.counts, PROMPT) == sum(cached)


def test_recurrent_gemma_keeps_its_states_in_its_layers_and_a_window_in_its_cache():
    from transformers import DynamicCache

    fields = {"lru_width": 32, "block_types": ["recurrent", "recurrent", "attention"], "attention_window_size": WINDOW}
    config = _config("RecurrentGemmaForCausalLM", fields, window=False)
    model, cache = _model("RecurrentGemmaForCausalLM", config), DynamicCache(config=config)
    model.model._setup_cache(config, 1, model.device, model.dtype)  # a forward does so where it makes the cache itself
    seen = 0
    for count in (WINDOW - 1, 1, PROMPT):
        _run(model, _tokens(count, seen), cache)
        seen += count
    blocks = [layer.temporal_block for layer in model.model.layers]
    cached = [(block.conv1d_state, block.rg_lru.recurrent_states) for block in blocks if hasattr(block, "rg_lru")]
    states = [sum(each.numel() * each.element_size() for each in pair) for pair in cached]
    spec = _spec("RecurrentGemmaForCausalLM", config)
    kinds = kept_tensors(spec, 1, 0, 0, False)
    predicted = []
    for at in spec.layers.pattern:
        wide = sum(one.elements * (4 if one.name == "lru_state" else 2) for one in kinds[at] if one.fixed)
        predicted.append(wide + 2 * _elements(tuple(one for one in kinds[at] if not one.fixed), seen, short=1))
    assert predicted == [states[0], states[1], _bytes(cache.layers[2]), states[2]]
    whole = cache_of(spec, ServingPlan(context=seen))
    assert whole.sequence_bytes(spec.layers.counts, seen) == sum(predicted) + _one_more(kinds, spec)


def _one_more(kinds: tuple[tuple[Kept, ...], ...], spec: ModelSpec) -> int:
    """Bytes of the one token that a full window of transformers leaves to the next step."""
    return sum(2 * one.elements for at in spec.layers.pattern for one in kinds[at] if one.most)


V4 = EXPERTS | {
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "num_key_value_heads": 1,
    "qk_rope_head_dim": 4,
    "index_n_heads": 2,
    "index_head_dim": 4,
    "index_topk": 4,
    "hc_mult": 2,
    "num_hash_layers": 1,
    "sliding_window": WINDOW,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "layer_types": ["sliding_attention", *["compressed_sparse_attention", "heavily_compressed_attention"] * 2][:4],
}


@pytest.mark.parametrize("tokens", [7, 13, 16, 30])
def test_deepseek_v4_keeps_a_window_and_an_entry_for_each_full_group_of_tokens(tokens):
    """transformers also holds the tokens of the entry not yet full, and what two overlapping entries share: the prediction
    leaves these out, and says so."""
    import torch

    config = _config("DeepseekV4ForCausalLM", V4)
    cache = _run(_model("DeepseekV4ForCausalLM", config), _tokens(tokens), None).cache
    spec = _spec("DeepseekV4ForCausalLM", config)
    kinds = kept_tensors(spec, 1, 0, 0, False)
    for at, layer in zip(spec.layers.pattern, cache.layers, strict=True):
        kept = {one.name: one for one in kinds[at]}
        window = min(tokens, WINDOW - 1) * kept["window"].elements
        assert torch.equal(layer.keys, layer.values)  # key and value are one vector
        assert layer.keys.numel() == window
        for name, entry in (("compressor", "entries"), ("indexer", "index_key")):
            one = kept.get(entry)
            cached = getattr(layer, "compressed_kv", {}).get(name)
            assert (cached.numel() if cached is not None else 0) == (tokens // one.every * one.elements if one else 0)
            if one:
                assert layer.buffer_kv[name].shape[1] == layer.buffer_gate[name].shape[1] == tokens % one.every


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
SEEING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2VLForConditionalGeneration": (ROPE, {"embed_dim": 32, "hidden_size": 32, "depth": 1, "num_heads": 4}),
    "Qwen2_5_VLForConditionalGeneration": (
        ROPE,
        {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 4},
    ),
    "Glm4vForConditionalGeneration": (
        ROPE,
        {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 4},
    ),
    "LlavaNextForConditionalGeneration": ({"model_type": "mistral", "sliding_window": WINDOW}, {}),
    "Mistral3ForConditionalGeneration": ({"model_type": "mistral", "sliding_window": None}, {}),
    "PaliGemmaForConditionalGeneration": ({"model_type": "gemma"}, {}),
    "SmolVLMForConditionalGeneration": ({"model_type": "llama"}, {}),
    "InternVLForConditionalGeneration": ({"model_type": "qwen3"}, {}),
    "AyaVisionForConditionalGeneration": ({"model_type": "cohere2", "sliding_window": WINDOW}, {}),
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
}
VISION |= {"patch_size": 14, "projection_dim": 32}
TYPES = {"Mistral3": "pixtral", "LlavaNext": "clip_vision_model", "PaliGemma": "siglip_vision_model"}
TYPES |= {"AyaVision": "siglip_vision_model"}


@pytest.mark.parametrize("name", SEEING)
def test_what_a_model_that_sees_keeps_of_a_text(name):
    import transformers
    from transformers import StaticCache

    text, vision = SEEING[name]
    kind = TYPES.get(name.removesuffix("ForConditionalGeneration"))
    given = {"text_config": SIZES | text, "vision_config": vision or VISION | ({"model_type": kind} if kind else {})}
    if name.startswith("PaliGemma"):
        given["projection_dim"] = SIZES["hidden_size"]
    config = getattr(transformers, name).config_class(**given)
    cache = StaticCache(config=config, max_cache_len=CONTEXT)
    _run(_model(name, config), _tokens(PROMPT), cache)
    spec = _spec(name, config)
    predicted = cache_of(spec, ServingPlan(context=CONTEXT))
    assert predicted.sequence_bytes(spec.layers.counts, CONTEXT) == sum(map(_bytes, cache.layers))


def test_llama_vision_keeps_a_picture_in_the_layers_that_a_text_passes_by():
    import torch
    import transformers

    text = SIZES | {"num_hidden_layers": 5, "cross_attention_layers": [1, 3]}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_global_layers": 1,
        "attention_heads": 4,
    }
    vision |= {"image_size": 28, "patch_size": 14, "vision_output_dim": 32, "max_num_tiles": 4}
    name = "MllamaForConditionalGeneration"
    config = getattr(transformers, name).config_class(text_config=text, vision_config=vision)
    model, spec = _model(name, config), _spec(name, config)
    alone = _run(model, _tokens(PROMPT), None).cache
    predicted = cache_of(spec, ServingPlan(context=PROMPT)).sequence_bytes(spec.layers.counts, PROMPT)
    assert predicted == sum(map(_bytes, alone.layers))
    seen = 4 * (2 * 2 + 1)  # tiles x (patches and a class token)
    states = torch.zeros(1, seen, SIZES["hidden_size"], dtype=torch.bfloat16)
    both = _run(model, _tokens(PROMPT), None, cross_attention_states=states).cache
    more = (sum(map(_bytes, both.layers)) - predicted) // 2
    assert any(f"its {seen:,} tokens, {more:,} numbers in all" in note for note in spec.assumptions)
