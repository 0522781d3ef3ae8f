"""Configs of other programs as config.json: Mistral's and Meta's params.json, Mamba's own, GPT-NeoX, Megatron-LM and NeMo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from calc.errors import InputError
from calc.model.fields import MOST_LAYERS, Fields
from calc.units import round_up

Translated = tuple[dict[str, Any], tuple[str, ...]]  # the config.json, and what to say about it


def translated(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The config.json that another program's config stands for, and what was taken for it; a config.json as it is.

    InputError for a format that is recognised and not covered (diffusers, an adapter), by its name.
    """
    if config.get("architectures") or isinstance(config.get("model_type"), str):
        return config, ()
    for signs, read in _FORMATS:
        if all(any(sign in config for sign in sign_group) for sign_group in signs):
            return read(config)
    return config, ()


def _diffusers(config: Mapping[str, Any]) -> Translated:
    name = str(config.get("_class_name"))[:80]
    raise InputError(
        f"_class_name: {name!r} is a diffusers model; diffusion models are not covered, language models and encoders are",
        "_class_name",
    )


def _adapter(config: Mapping[str, Any]) -> Translated:
    base = str(config.get("base_model_name_or_path"))[:80]
    raise InputError(
        f"config: this is the adapter_config.json of an adapter of {base!r}; give the folder that holds it, or the base model",
        "config",
    )


def _quantization(config: Mapping[str, Any]) -> Translated:
    raise InputError(
        "config: this is a hf_quant_config.json, which says how weights are stored; give the config.json of its folder",
        "config",
    )


def _plain(config: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: config[key] for key in keys if config.get(key) is not None}


def _mistral(config: Mapping[str, Any]) -> Translated:
    """params.json of Mistral and of Meta's Llama: `dim`, `n_layers`, `n_heads`; Meta's MLP width follows from three fields."""
    fields = Fields(config)
    width, count = fields.size("dim"), fields.size("n_heads")
    told = ["config: read as params.json, whose dim is hidden_size"]
    inner = fields.size("hidden_dim") if fields.has("hidden_dim") else _meta_width(fields, width)
    experts = config.get("moe")
    vocab = config.get("vocab_size")
    if vocab in (None, -1):
        raise InputError.of(
            "vocab_size", vocab, "params.json leaves it to the tokenizer; state it (Llama 2: 32000, Llama 3: 128256)"
        )
    made: dict[str, Any] = {
        "architectures": ["MixtralForCausalLM" if isinstance(experts, dict) else "MistralForCausalLM"],
        "hidden_size": width,
        "num_hidden_layers": fields.size("n_layers", high=MOST_LAYERS),
        "num_attention_heads": count,
        "num_key_value_heads": fields.size("n_kv_heads", default=count) if fields.has("n_kv_heads") else count,
        "head_dim": fields.size("head_dim") if fields.has("head_dim") else width // count,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "rms_norm_eps": config.get("norm_eps", 1e-5),
        "sliding_window": config.get("sliding_window"),
        "tie_word_embeddings": bool(config.get("tied_embeddings", False)),
        "max_position_embeddings": config.get("max_position_embeddings") or config.get("max_seq_len") or 32768,
        **_plain(config, "rope_theta", "torch_dtype"),
    }
    if isinstance(experts, dict):
        inside = Fields(experts, "moe")
        made["num_local_experts"] = inside.size("num_experts")
        made["num_experts_per_tok"] = inside.size("num_experts_per_tok")
    if isinstance(config.get("vision_encoder"), dict):
        told.append("vision_encoder is not counted: the text model alone is")
    return made, tuple(told)


def _meta_width(fields: Fields, width: int) -> int:
    """The width of Meta's MLP: 2/3 of 4 dim, times ffn_dim_multiplier, rounded up to multiple_of (llama/model.py)."""
    times = fields.number("ffn_dim_multiplier", default=1.0, high=64.0)
    return round_up(int(times * int(2 * 4 * width / 3)), fields.size("multiple_of", default=256))


def _mamba(config: Mapping[str, Any]) -> Translated:
    """mamba_ssm's config: d_model, n_layer and ssm_cfg; the vocabulary is padded."""
    fields = Fields(config)
    width, inside = fields.size("d_model"), config.get("ssm_cfg")
    inside = inside if isinstance(inside, dict) else {}
    if config.get("attn_layer_idx"):
        raise InputError.of(
            "attn_layer_idx", config["attn_layer_idx"], "only a model without attention layers is understood"
        )
    multiple = fields.size("pad_vocab_size_multiple", default=8)
    second = str(inside.get("layer", "Mamba1")) == "Mamba2"
    own = Fields(inside, "ssm_cfg")
    expand = own.size("expand", default=2, high=64) if own.has("expand") else 2
    made: dict[str, Any] = {
        "architectures": ["Mamba2ForCausalLM" if second else "MambaForCausalLM"],
        "hidden_size": width,
        "num_hidden_layers": fields.size("n_layer", high=MOST_LAYERS),
        "vocab_size": round_up(fields.size("vocab_size"), multiple),
        "state_size": own.size("d_state", default=128 if second else 16)
        if own.has("d_state")
        else 128
        if second
        else 16,
        "conv_kernel": own.size("d_conv", default=4, high=64) if own.has("d_conv") else 4,
        "expand": expand,
        "tie_word_embeddings": bool(config.get("tie_embeddings", True)),
    }
    if second:
        head = own.size("headdim", default=64) if own.has("headdim") else 64
        made |= {"head_dim": head, "num_heads": expand * width // head, "n_groups": 1}
    else:
        made["intermediate_size"] = expand * width
    return made, (
        "config: read as mamba_ssm's own, whose vocabulary is padded to a multiple of pad_vocab_size_multiple",
    )


def _megatron(config: Mapping[str, Any]) -> Translated:
    """Megatron-LM's and NeMo's fields: a Llama-like or a GPT-2-like decoder by its norm, its MLP, its positions and its biases."""
    fields = Fields(config)
    width, count = fields.size("hidden_size"), fields.size("num_attention_heads")
    activation = str(config.get("activation") or config.get("activation_func") or "")
    gated = bool(config.get("swiglu")) or "glu" in activation
    norm = str(config.get("normalization") or "layernorm").lower()
    positions = str(
        config.get("position_embedding_type")
        or ("rope" if config.get("use_rotary_position_embeddings") else "learned_absolute")
    )
    plain = (
        config.get("bias") is False or config.get("add_bias_linear") is False or bool(config.get("disable_bias_linear"))
    )
    untied = (
        bool(config.get("untie_embeddings_and_output_weights"))
        or config.get("share_embeddings_and_output_weights") is False
    )
    experts = (
        fields.size("num_experts", "num_moe_experts", default=1) if fields.has("num_experts", "num_moe_experts") else 1
    )
    if experts > 1:
        raise InputError.of(
            "num_experts", experts, "experts of a Megatron config are not understood; give the config.json"
        )
    vocab, told = _vocabulary(fields)
    kv = (
        fields.size("num_query_groups", default=count)
        if config.get("group_query_attention") or fields.has("num_query_groups")
        else count
    )
    common = {
        "hidden_size": width,
        "num_hidden_layers": fields.size("num_layers", "encoder_num_layers", high=MOST_LAYERS),
        "num_attention_heads": count,
        "vocab_size": vocab,
        "tie_word_embeddings": not untied,
    }
    length = (
        config.get("max_position_embeddings") or config.get("encoder_seq_length") or config.get("seq_length") or 2048
    )
    if gated and "rms" in norm and positions in ("rope", "rotary") and plain:
        own = {
            "architectures": [
                "Qwen2ForCausalLM" if config.get("add_qkv_bias") or config.get("qkv_bias") else "LlamaForCausalLM"
            ],
            "num_key_value_heads": kv,
            "head_dim": fields.size("kv_channels", default=width // count)
            if fields.has("kv_channels")
            else width // count,
            "intermediate_size": fields.size("ffn_hidden_size"),
            "max_position_embeddings": length,
            "use_sliding_window": False,
        }
    elif not gated and "rms" not in norm and positions == "learned_absolute" and not plain and not untied:
        own = {
            "architectures": ["GPT2LMHeadModel"],
            "n_inner": fields.size("ffn_hidden_size", default=4 * width)
            if fields.has("ffn_hidden_size")
            else 4 * width,
            "n_positions": length,
        }
    else:
        shape = f"swiglu {gated}, normalization {norm}, position_embedding_type {positions}, biases {not plain}, tied {not untied}"
        raise InputError(
            f"config: a Megatron decoder with {shape} is not understood; Llama's (swiglu, RMSNorm, rope, no biases) and GPT-2's "
            "(LayerNorm, learned positions, biases, tied) are",
            "config",
        )
    return {**common, **own}, ("config: read as Megatron-LM's", *told)


def _vocabulary(fields: Fields, usual: int = 0) -> tuple[int, tuple[str, ...]]:
    """The padded vocabulary, and what was taken for it."""
    if fields.has("padded_vocab_size"):
        return fields.size("padded_vocab_size"), ()
    if not fields.has("vocab_size", "override_vocab_size") and not usual:
        raise InputError(
            "vocab_size: missing; the file leaves it to the tokenizer: state vocab_size or padded_vocab_size",
            "vocab_size",
        )
    size = (
        fields.size("override_vocab_size", "vocab_size", default=usual)
        if fields.has("vocab_size", "override_vocab_size")
        else usual
    )
    multiple = (
        fields.size("make_vocab_size_divisible_by", default=128) if fields.has("make_vocab_size_divisible_by") else 128
    )
    ways = (
        fields.size("tensor_model_parallel_size", "model_parallel_size", default=1)
        if fields.has("tensor_model_parallel_size", "model_parallel_size")
        else 1
    )
    padded = round_up(size, multiple * ways)
    return padded, (f"vocab_size = {padded} ({size} padded to a multiple of {multiple} x {ways})",)


def _neox(config: Mapping[str, Any]) -> Translated:
    """GPT-NeoX's YAML: names with hyphens; the vocabulary is its tokenizer's, padded."""
    fields = Fields({str(key).replace("-", "_"): value for key, value in config.items()})
    width = fields.size("hidden_size")
    usual = (
        0
        if str(fields.data.get("tokenizer_type", "GPT2BPETokenizer")) not in ("GPT2BPETokenizer", "HFTokenizer")
        else 50257
    )
    vocab, told = _vocabulary(fields, usual)
    if not fields.has("vocab_size", "padded_vocab_size"):
        told = (
            f"vocab_size = {vocab} (not in the file: GPT-2's and NeoX's tokenizers have 50,257 to 50,277 words, padded)",
        )
    rotary = str(fields.data.get("pos_emb", "learned"))
    if rotary != "rotary" or "rms" in str(fields.data.get("norm", "layernorm")):
        raise InputError.of(
            "pos_emb", rotary, "only rotary positions with layernorm are understood for a GPT-NeoX file"
        )
    untied = fields.data.get("no_weight_tying", False)
    made = {
        "architectures": ["GPTNeoXForCausalLM"],
        "hidden_size": width,
        "num_hidden_layers": fields.size("num_layers", high=MOST_LAYERS),
        "num_attention_heads": fields.size("num_attention_heads"),
        "intermediate_size": fields.size("intermediate_size", default=4 * width)
        if fields.has("intermediate_size")
        else 4 * width,
        "vocab_size": vocab,
        "max_position_embeddings": fields.size("max_position_embeddings", "seq_length", default=2048),
        "tie_word_embeddings": not untied,
        "use_parallel_residual": bool(fields.data.get("gpt_j_residual", False)),
        "rotary_pct": fields.data.get("rotary_pct", 1.0),
    }
    return made, ("config: read as GPT-NeoX's", *told)


def _nemo(config: Mapping[str, Any]) -> Translated:
    return _megatron(config["model"]) if isinstance(config["model"], dict) else (dict(config), ())


# the fields that tell a format (one of each group), and what reads it; the first that fits
_FORMATS: Final[tuple[tuple[tuple[tuple[str, ...], ...], Callable[[Mapping[str, Any]], Translated]], ...]] = (
    ((("_class_name", "_diffusers_version"),), _diffusers),
    ((("peft_type",), ("base_model_name_or_path",)), _adapter),
    ((("producer",), ("quantization",)), _quantization),
    ((("dim",), ("n_layers",), ("n_heads",)), _mistral),
    ((("ssm_cfg",), ("d_model",)), _mamba),
    ((("num-layers",), ("hidden-size",)), _neox),
    ((("num_layers",), ("hidden_size",), ("pos_emb", "no_weight_tying", "gpt_j_residual")), _neox),
    ((("num_layers", "encoder_num_layers"), ("hidden_size",), ("num_attention_heads",)), _megatron),
    ((("model",), ("trainer", "exp_manager", "name")), _nemo),
)
