"""Decoders whose class comes with the checkpoint: Qwen 1, Baichuan 1 and 2, ChatGLM 2 and 3 and GLM-4's first form."""

from __future__ import annotations

from dataclasses import replace

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.common import (
    LAYER_NORM,
    assemble,
    attention,
    dropouts,
    hidden,
    mlp,
    norms,
    uniform,
    whole_heads,
)
from calc.model.families.llama_variants import Traits, dense
from calc.model.fields import Fields
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Norm, Weight, dim

_BAICHUAN_7B = 4096  # hidden size of the models that rotate; the classes of the others bias their scores instead


def _refuse(fields: Fields, what: str, *keys: str) -> None:
    """InputError where a field adds weights that are not counted."""
    for key in keys:
        fields.ignore(key)
        if fields.data.get(key):
            raise InputError.of(key, fields.data[key], f"only null or none is understood for {what}")


def qwen(fields: Fields) -> ModelSpec:
    """Qwen 1: biases on query, key and value; `intermediate_size` counts gate and up together."""
    fields.ignore("visual")  # an encoder of pictures; what is left out is said where the class is chosen
    both = fields.size("intermediate_size", "ffn_hidden_size")
    if both % 2:
        raise InputError.of("intermediate_size", both, "it counts gate and up together, so it must be even")
    sizes = whole_heads(fields)
    size = fields.size("kv_channels", default=sizes[2])
    if size != sizes[2]:
        raise InputError.of("kv_channels", size, f"times {sizes[0]} heads it must be hidden_size ({hidden(fields)})")
    plain = fields.flag("no_bias", default=True)
    mixer = attention(
        fields, sizes=sizes, bias="qkv" if plain else "qkvo", modules=("c_attn", "c_attn", "c_attn", "c_proj")
    )
    feed_forward = mlp(fields, width=both // 2, bias=not plain, activation="silu", modules=("w2", "w1", "c_proj"))
    fields.ignore("bf16", "fp16", "fp32", "onnx_safe", "seq_length", "padded_vocab_size", "params_dtype", "pos_emb")
    fields.ignore("use_dynamic_ntk", "use_flash_attn", "use_logn_attn", "use_cache_quantization", "use_cache_kernel")
    fields.ignore("softmax_in_fp32", "tokenizer_type", "bias_dropout_fusion")
    fields.ignore("apply_residual_connection_post_layernorm")
    places = {"embedding": "emb_dropout_prob", "attention": "attn_dropout_prob"}
    layer = Layer("layer", mixer, feed_forward, norms(fields))
    return assemble(fields, uniform(fields, layer), dropout=dropouts(fields, **places))


def baichuan(fields: Fields) -> ModelSpec:
    """Baichuan 1 and 2: Llama with one projection for query, key and value. The 13B models have ALiBi, which no field tells."""
    rotary = hidden(fields) == _BAICHUAN_7B
    fields.ignore("z_loss_weight", "_from_model_config", "gradient_checkpointing")
    if not rotary:
        fields.assumptions.append("positions = ALiBi (not in the config; the 13B models' own class biases the scores)")
    names = ("W_pack", "W_pack", "W_pack", "o_proj")
    traits = {"sizes": whole_heads(fields), "modules": names, "rotary": rotary}
    return dense(Traits(bias_flag="", attention=traits))(fields)


def chatglm1(fields: Fields) -> ModelSpec:
    """ChatGLM-6B, the first: LayerNorms, biases everywhere, two-dimensional rotary positions, and the head tied to the embedding."""
    _refuse(fields, "ChatGLM", "pre_seq_len", "quantization_bit")
    if not fields.flag("position_encoding_2d", default=True):
        raise InputError.of("position_encoding_2d", False, "only true is understood for the first ChatGLM")
    count, _, size = whole_heads(fields)
    modules = ("query_key_value", "query_key_value", "query_key_value", "dense")
    mixer = attention(fields, sizes=(count, count, size), bias="qkvo", modules=modules)
    width = fields.size_or_none("inner_hidden_size") or 4 * hidden(fields)
    names = ("", "dense_h_to_4h", "dense_4h_to_h")
    feed_forward = mlp(fields, width=width, gated=False, bias=True, activation="gelu", modules=names)
    fields.ignore("max_sequence_length", "prefix_projection", "gmask_token_id", "layernorm_epsilon")
    h = dim("h", hidden(fields))
    layer = Layer("layer", mixer, feed_forward, norms(fields, **LAYER_NORM))
    return assemble(fields, uniform(fields, layer), tied=True, final_norm=Norm("weight", h, **LAYER_NORM))


def chatglm(fields: Fields) -> ModelSpec:
    """ChatGLM 2 and 3 and glm-4-9b: half of each head rotates; the vocabulary is `padded_vocab_size`. The first one is another model."""
    if fields.has("inner_hidden_size") or fields.data.get("position_encoding_2d"):
        return chatglm1(fields)
    _refuse(fields, "ChatGLM", "pre_seq_len", "quantization_bit")
    fields.ignore("vision_config")  # GLM-4V's encoder of pictures; what is left out is said where the class is chosen
    fields.ignore("position_encoding_2d")
    count = fields.size("num_attention_heads")
    size = fields.size("kv_channels", default=128)
    grouped = fields.flag("multi_query_attention", default=False)
    kv = fields.size("multi_query_group_num", default=1) if grouped else count
    fields.divides("multi_query_group_num", kv, "num_attention_heads", count)
    everywhere = fields.flag("add_bias_linear", default=False)
    letters = "qkvo" if everywhere else "qkv" if fields.flag("add_qkv_bias", default=False) else ""
    mixer = attention(
        fields,
        sizes=(count, kv, size),
        bias=letters,
        modules=("query_key_value", "query_key_value", "query_key_value", "dense"),
        rotary_dim=size // 2,
        rotary_joined=True,
    )
    names = ("dense_h_to_4h", "dense_h_to_4h", "dense_4h_to_h")
    feed_forward = mlp(fields, "ffn_hidden_size", bias=everywhere, activation="silu", modules=names)
    style = {} if fields.flag("rmsnorm", default=True) else LAYER_NORM
    fields.ignore("vocab_size", "seq_length", "original_rope", "rope_ratio", "bias_dropout_fusion", "prefix_projection")
    fields.ignore("attention_softmax_in_fp32", "apply_query_key_layer_scaling", "fp32_residual_connection")
    fields.ignore("apply_residual_connection_post_layernorm", "multi_query_group_num", "interleaved_qkv")
    fields.ignore("classifier_dropout")
    h = dim("h", hidden(fields))
    last = fields.flag("post_layer_norm", default=True)
    return assemble(
        fields,
        uniform(fields, Layer("layer", mixer, feed_forward, norms(fields, **style))),
        vocab_key="padded_vocab_size",
        never_tied=True,
        final_norm=Norm("weight", h, **style),
        no_final_norm=not last,
        dropout=dropouts(fields, attention="attention_dropout", residual="hidden_dropout"),
    )


def molmo(fields: Fields) -> ModelSpec:
    """Molmo's text model (Qwen 2's and OLMo's shape): gate and up in one projection, and 128 words more in a table of their own."""
    if fields.data.get("layer_norm_type", "rms") != "rms" or fields.data.get("norm_after"):
        raise InputError.of(
            "layer_norm_type", fields.data.get("layer_norm_type"), "only rms before each half is understood"
        )
    both = fields.size("intermediate_size")
    if both % 2:
        raise InputError.of("intermediate_size", both, "it counts gate and up together, so it must be even")
    letters = "qkv" if fields.flag("qkv_bias", default=False) else ""
    names = ("att_proj", "att_proj", "att_proj", "attn_out")
    mixer = attention(fields, bias=letters, modules=names)
    feed_forward = mlp(fields, width=both // 2, activation="silu", modules=("ff_proj", "ff_proj", "ff_out"))
    if fields.flag("attention_layer_norm", default=False):
        raise InputError.of("attention_layer_norm", True, "only false is understood for Molmo")
    fields.ignore(
        "clip_qkv", "norm_after", "layer_norm_type", "use_position_ids", "weight_tying", "vocab_size", "embedding_size"
    )
    h, words = dim("h", hidden(fields)), dim("V_m", 128)
    spec = assemble(
        fields,
        uniform(fields, Layer("layer", mixer, feed_forward, norms(fields))),
        tied=fields.data.get("weight_tying") is True,
        vocab_key="embedding_size" if fields.has("embedding_size") else "vocab_size",
        embeddings=(Weight("more_words", (words, h)),),
    )
    note = "counted is Molmo's text model alone: its vision encoder (vision_backbone) is not in the config, and not counted"
    return replace(spec, notes=(*spec.notes, note))


_HUB = "https://huggingface.co/"
QWEN = f"{_HUB}Qwen/Qwen-7B/blob/main/modeling_qwen.py"
BAICHUAN_7B = f"{_HUB}baichuan-inc/Baichuan-7B/blob/main/modeling_baichuan.py"
BAICHUAN2 = f"{_HUB}baichuan-inc/Baichuan2-13B-Base/blob/main/modeling_baichuan.py"
CHATGLM = f"{_HUB}THUDM/glm-4-9b-chat/blob/main/modeling_chatglm.py"

MOLMO = f"{_HUB}allenai/Molmo-7B-D-0924/blob/main/modeling_molmo.py"

FAMILIES = {
    "MolmoForCausalLM": Family(molmo, MOLMO),
    "QWenLMHeadModel": Family(qwen, QWEN),
    "BaiChuanForCausalLM": Family(baichuan, BAICHUAN_7B),
    "BaichuanForCausalLM": Family(baichuan, BAICHUAN2),
    "ChatGLMModel": Family(chatglm, CHATGLM),
    "ChatGLMForConditionalGeneration": Family(chatglm, CHATGLM),
}
