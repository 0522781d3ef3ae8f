"""Decoders with LayerNorm and plain MLPs: GPT-2 and its kin."""

from __future__ import annotations

from typing import Any

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.common import (
    LAYER_NORM,
    assemble,
    attention,
    bias,
    dropouts,
    hidden,
    mlp,
    norms,
    num_layers,
    position_table,
    uniform,
    whole_heads,
)
from calc.model.fields import Fields
from calc.model.mixers import Attention
from calc.model.spec import Layer, ModelSpec, Stack
from calc.model.weights import Norm, Weight, dim

PRE = ("input_norm", "post_attention_norm")
QKV = ("query_key_value", "query_key_value", "query_key_value", "dense")
_GPT2_DROPOUT = {"attention": "attn_pdrop", "residual": "resid_pdrop", "embedding": "embd_pdrop"}
_DROPOUT = {"attention": "attention_dropout", "residual": "hidden_dropout"}


def layer_norms(fields: Fields, *names: str, **traits: Any) -> tuple[Norm, ...]:
    """torch LayerNorms over the hidden size."""
    return norms(fields, *names, **(LAYER_NORM | traits))


def final(fields: Fields, **traits: Any) -> Norm:
    return Norm("weight", dim("h", hidden(fields)), **(LAYER_NORM | traits))


def plain_mlp(fields: Fields, up: str, down: str, *keys: str, has_bias: bool = True, **traits: Any) -> Any:
    """down(act(up(x))); its width is 4 h where the config gives none."""
    width = traits.pop("width", 0) or fields.size_or_none(*keys) or 4 * hidden(fields)
    return mlp(fields, width=width, gated=False, bias=has_bias, modules=("", up, down), **traits)


def _gpt2_like(fields: Fields, kv_heads: int | None, width: int = 0, **model: Any) -> ModelSpec:
    if fields.flag("add_cross_attention", default=False):
        raise InputError.of("add_cross_attention", True, "only false is understood for this class")
    count, _, head_dim = whole_heads(fields)
    mixer = attention(
        fields,
        sizes=(count, kv_heads or count, head_dim),
        bias="qkvo",
        modules=("c_attn", "c_attn", "c_attn", "c_proj"),
        rotary=False,
    )
    layer = Layer(
        "layer", mixer, plain_mlp(fields, "c_fc", "c_proj", "n_inner", width=width), layer_norms(fields, *PRE)
    )
    return assemble(
        fields,
        uniform(fields, layer),
        tied=True,
        embeddings=(position_table(fields, "n_positions", "max_position_embeddings", "n_ctx"),),
        dropout=dropouts(fields, **_GPT2_DROPOUT),
        **({"final_norm": final(fields)} | model),
    )


def gpt2(fields: Fields) -> ModelSpec:
    return _gpt2_like(fields, None)


def gpt1(fields: Fields) -> ModelSpec:
    """The first GPT: norms after each half, and none at the end."""
    fields.ignore("afn")
    return _gpt2_like(fields, None, 4 * hidden(fields), no_final_norm=True)


def ctrl(fields: Fields) -> ModelSpec:
    """CTRL: sines for positions, norms before each half, and a bias on the head."""
    mixer = attention(fields, sizes=whole_heads(fields), bias="qkvo", modules=("Wq", "Wk", "Wv", "dense"), rotary=False)
    feed_forward = mlp(fields, "dff", gated=False, bias=True, activation="relu", modules=("", "0", "2"))
    layer = Layer("layer", mixer, feed_forward, layer_norms(fields, *PRE))
    places = {"residual": "resid_pdrop", "embedding": "embd_pdrop"}
    return assemble(
        fields,
        uniform(fields, layer),
        tied=True,
        final_norm=final(fields),
        head_bias=True,
        embedding_scale=True,
        dropout=dropouts(fields, **places),
    )


def bigcode(fields: Fields) -> ModelSpec:
    """StarCoder 1: GPT-2 with one KV head."""
    return _gpt2_like(fields, 1 if fields.flag("multi_query", default=True) else None)


def gptj(fields: Fields, first: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")) -> ModelSpec:
    """GPT-J and CodeGen, whose `first` projections are one: attention without bias and MLP with bias, side by side on one norm; the
    head has a bias."""
    fields.ignore("rotary")
    sizes = whole_heads(fields)
    turned = fields.size("rotary_dim", default=64)
    modules = (*first, "out_proj")
    mixer = attention(fields, sizes=sizes, modules=modules, rotary_dim=turned, rotary_joined=turned < sizes[2])
    feed_forward = plain_mlp(fields, "fc_in", "fc_out", "n_inner")
    layer = Layer("layer", mixer, feed_forward, layer_norms(fields, "input_norm"), parallel=True)
    return assemble(
        fields,
        uniform(fields, layer),
        final_norm=final(fields),
        head_bias=True,
        dropout=dropouts(fields, **_GPT2_DROPOUT),
    )


def gpt_neo(fields: Fields) -> ModelSpec:
    """GPT-Neo: only the output projection has a bias; layers alternate between all tokens and a window."""
    size = fields.size("window_size", default=256)
    kinds = _neo_kinds(fields)
    feed_forward = plain_mlp(fields, "c_fc", "c_proj", "intermediate_size")

    def layer(kind: str) -> Layer:
        width = size if kind == "local" else 0
        mixer = attention(
            fields,
            sizes=whole_heads(fields),
            bias="o",
            window=width,
            rotary=False,
            modules=("q_proj", "k_proj", "v_proj", "out_proj"),
        )
        return Layer({"local": "sliding", "global": "full"}[kind], mixer, feed_forward, layer_norms(fields, *PRE))

    present = list(dict.fromkeys(kinds))
    stack = Stack(tuple(layer(kind) for kind in present), tuple(present.index(kind) for kind in kinds))
    places = {"attention": "attention_dropout", "residual": "resid_dropout", "embedding": "embed_dropout"}
    return assemble(
        fields,
        stack,
        tied=True,
        embeddings=(position_table(fields),),
        final_norm=final(fields),
        dropout=dropouts(fields, **places),
    )


def _neo_kinds(fields: Fields) -> list[str]:
    """The kind of each layer from `attention_types`: [[["global", "local"], 12]] is the pair twelve times."""
    count = num_layers(fields)
    fields.ignore("attention_layers")
    groups = fields.items("attention_types")
    allowed = 'it must be like [[["global", "local"], 12]] and name every layer'
    if groups is None:
        return ["global" if at % 2 == 0 else "local" for at in range(count)]
    kinds: list[str] = []
    for group in groups:
        if not (isinstance(group, list) and len(group) == 2 and isinstance(group[0], list)):
            raise InputError.of("attention_types", groups, allowed)
        names, times = group
        if not isinstance(times, int) or not 0 <= times <= count or not {*map(str, names)} <= {"global", "local"}:
            raise InputError.of("attention_types", groups, allowed)
        kinds += names * times
    if len(kinds) != count:
        raise InputError.of("attention_types", groups, allowed)
    return kinds


def gpt_neox(fields: Fields) -> ModelSpec:
    """GPT-NeoX and Pythia."""
    mixer = attention(fields, sizes=whole_heads(fields), bias=bias(fields, default=True), modules=QKV)
    feed_forward = plain_mlp(fields, "dense_h_to_4h", "dense_4h_to_h", "intermediate_size")
    parallel = fields.flag("use_parallel_residual", default=True)
    layer = Layer("layer", mixer, feed_forward, layer_norms(fields, *PRE), parallel=parallel)
    return assemble(fields, uniform(fields, layer), final_norm=final(fields), dropout=dropouts(fields, **_DROPOUT))


def gpt_neox_japanese(fields: Fields) -> ModelSpec:
    """No biases but one, on the last layer's attention output."""
    width = fields.size("intermediate_multiple_size", default=4) * hidden(fields)
    feed_forward = mlp(fields, width=width, gated=False, modules=("", "dense_h_to_4h", "dense_4h_to_h"))
    extra = (Weight("output_bias", (dim("h", hidden(fields)),)),)
    plain, last = (
        Layer(
            name,
            attention(fields, sizes=whole_heads(fields), modules=QKV, extra=weights),
            feed_forward,
            layer_norms(fields, *PRE),
        )
        for name, weights in (("layer", ()), ("last", extra))
    )
    count = num_layers(fields)
    return assemble(
        fields,
        Stack((plain, last), (0,) * (count - 1) + (1,)),
        tied=True,
        final_norm=final(fields),
        dropout=dropouts(fields, **_DROPOUT),
    )


def bloom(fields: Fields) -> ModelSpec:
    """BLOOM: ALiBi instead of positions, and a norm on the embedding."""
    mixer = attention(fields, sizes=whole_heads(fields), bias="qkvo", modules=QKV, rotary=False)
    feed_forward = plain_mlp(
        fields, "dense_h_to_4h", "dense_4h_to_h", width=4 * hidden(fields), activation="bloom_gelu"
    )
    layer = Layer("layer", mixer, feed_forward, layer_norms(fields, *PRE))
    fields.ignore("apply_residual_connection_post_layernorm", "slow_but_exact", "unk_token_id", "offset_alibi")
    embedding_norm = Norm("norm", dim("h", hidden(fields)), **LAYER_NORM)
    return assemble(
        fields,
        uniform(fields, layer),
        tied=True,
        embeddings=embedding_norm.weights,
        final_norm=final(fields),
        dropout=dropouts(fields, **_DROPOUT),
    )


def falcon(fields: Fields) -> ModelSpec:
    """Falcon 7B (one KV head), 40B and 180B (grouped heads, two norms side by side) and the RW models (ALiBi)."""
    count, _, head_dim = whole_heads(fields)
    grouped = fields.flag("new_decoder_architecture", default=False)
    one = fields.flag("multi_query", default=True)
    kv = (fields.size_or_none("num_kv_heads", "n_head_kv") or count) if grouped or not one else 1
    if not grouped and not one:
        kv = count
    letters = "qkvo" if fields.flag("bias", default=False) else ""
    parallel = fields.flag("parallel_attn", default=True)
    alibi = fields.flag("alibi", default=False)
    pair = fields.size_or_none("num_ln_in_parallel_attn", low=1, high=2) or (2 if grouped else 1)
    names = PRE if not parallel else ("attention_norm", "mlp_norm") if pair == 2 else ("input_norm",)
    mixer = Attention(hidden(fields), count, kv, head_dim, head_dim, bias=letters, modules=QKV, rotary=not alibi)
    feed_forward = plain_mlp(
        fields, "dense_h_to_4h", "dense_4h_to_h", "ffn_hidden_size", has_bias=bool(letters), activation="gelu"
    )
    fields.ignore("activation", "apply_residual_connection_post_layernorm", "num_kv_heads", "num_ln_in_parallel_attn")
    layer = Layer("layer", mixer, feed_forward, layer_norms(fields, *names), parallel=parallel)
    return assemble(
        fields, uniform(fields, layer), tied=True, final_norm=final(fields), dropout=dropouts(fields, **_DROPOUT)
    )


def mpt(fields: Fields) -> ModelSpec:
    """MPT as transformers builds it: ALiBi, no biases."""
    if not fields.flag("no_bias", default=True):
        raise InputError.of("no_bias", False, "only true is understood: transformers' class has no biases")
    fields.ignore(
        "attn_config", "learned_pos_emb", "expansion_ratio", "init_device", "logit_scale", "embedding_fraction"
    )
    fields.ignore("norm_type", "verbose", "init_config", "tokenizer_name")
    mixer = attention(fields, sizes=whole_heads(fields), modules=("Wqkv", "Wqkv", "Wqkv", "out_proj"), rotary=False)
    feed_forward = mlp(
        fields, width=4 * hidden(fields), gated=False, activation="gelu", modules=("", "up_proj", "down_proj")
    )
    layer = Layer("layer", mixer, feed_forward, layer_norms(fields, *PRE, bias=False))
    return assemble(fields, uniform(fields, layer), tied=True, final_norm=final(fields, bias=False))


def phi(fields: Fields) -> ModelSpec:
    """Phi 1, 1.5 and 2: biases everywhere, attention and MLP side by side. The first configs ("phi-msft") use GPT-2's names."""
    if fields.flag("qk_layernorm", default=False):
        raise InputError.of("qk_layernorm", True, "only false is understood for Phi")
    fields.ignore("flash_attn", "flash_rotary", "fused_dense", "img_processor", "qk_layernorm")
    mixer = attention(fields, bias="qkvo", modules=("q_proj", "k_proj", "v_proj", "dense"))
    old = fields.has("n_embd")  # 4 h, where the class's own default is for Phi-1
    keys = ("n_inner",) if old else ("intermediate_size",)
    feed_forward = plain_mlp(fields, "fc1", "fc2", *keys)
    layer = Layer("layer", mixer, feed_forward, layer_norms(fields, "input_norm"), parallel=True)
    places = {"attention": "attention_dropout", "residual": "resid_pdrop", "embedding": "embd_pdrop"}
    return assemble(
        fields, uniform(fields, layer), final_norm=final(fields), head_bias=True, dropout=dropouts(fields, **places)
    )


def starcoder2(fields: Fields) -> ModelSpec:
    has_bias = fields.flag("use_bias", default=True)
    mixer = attention(fields, bias="qkvo" if has_bias else "", window=fields.size_or_none("sliding_window") or 0)
    feed_forward = plain_mlp(fields, "c_fc", "c_proj", "intermediate_size", has_bias=has_bias)
    layer = Layer("layer", mixer, feed_forward, layer_norms(fields, *PRE))
    places = {"attention": "attention_dropout", "residual": "residual_dropout", "embedding": "embedding_dropout"}
    fields.ignore("mlp_type", "norm_type")
    return assemble(
        fields, uniform(fields, layer), tied=True, final_norm=final(fields), dropout=dropouts(fields, **places)
    )


def jais2(fields: Fields) -> ModelSpec:
    feed_forward = plain_mlp(
        fields, "up_proj", "down_proj", "intermediate_size", has_bias=fields.flag("mlp_bias", default=True)
    )
    mixer = attention(fields, bias=bias(fields, default=True))
    layer = Layer("layer", mixer, feed_forward, layer_norms(fields, *PRE))
    return assemble(
        fields,
        uniform(fields, layer),
        final_norm=final(fields),
        dropout=dropouts(fields, attention="attention_dropout"),
    )


def persimmon(fields: Fields) -> ModelSpec:
    qk = fields.flag("qk_layernorm", default=True)
    mixer = attention(
        fields, "head" if qk else "", sizes=whole_heads(fields), norm_traits=LAYER_NORM, bias="qkvo", modules=QKV
    )
    feed_forward = plain_mlp(fields, "dense_h_to_4h", "dense_4h_to_h", "intermediate_size")
    layer = Layer("layer", mixer, feed_forward, layer_norms(fields, *PRE))
    return assemble(fields, uniform(fields, layer), final_norm=final(fields), dropout=dropouts(fields, **_DROPOUT))


FAMILIES = {
    "CTRLLMHeadModel": Family(ctrl, "ctrl"),
    "GPT2LMHeadModel": Family(gpt2, "gpt2"),
    "OpenAIGPTLMHeadModel": Family(gpt1, "openai"),
    "GPTBigCodeForCausalLM": Family(bigcode, "gpt_bigcode"),
    "GPTJForCausalLM": Family(gptj, "gptj"),
    "CodeGenForCausalLM": Family(lambda fields: gptj(fields, ("qkv_proj",) * 3), "codegen"),
    "GPTNeoForCausalLM": Family(gpt_neo, "gpt_neo"),
    "GPTNeoXForCausalLM": Family(gpt_neox, "gpt_neox"),
    "GPTNeoXJapaneseForCausalLM": Family(gpt_neox_japanese, "gpt_neox_japanese"),
    "BloomForCausalLM": Family(bloom, "bloom"),
    "FalconForCausalLM": Family(falcon, "falcon"),
    "MptForCausalLM": Family(mpt, "mpt"),
    "PhiForCausalLM": Family(phi, "phi"),
    "Starcoder2ForCausalLM": Family(starcoder2, "starcoder2"),
    "Jais2ForCausalLM": Family(jais2, "jais2"),
    "PersimmonForCausalLM": Family(persimmon, "persimmon"),
}
