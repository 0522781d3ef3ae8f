"""Decoders whose classes come with their checkpoints: OpenELM, RWKV 7, and ColBERT's encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.bert_roberta import FAMILIES as BERT
from calc.model.families.common import (
    LAYER_NORM,
    assemble,
    attention,
    hidden,
    mlp,
    norms,
    num_layers,
)
from calc.model.feed_forward import MLP
from calc.model.fields import Fields
from calc.model.mixers import Recurrence
from calc.model.spec import Layer, ModelSpec, Stack
from calc.model.weights import Dim, Norm, Part, Split, State, Weight, dim, linear


def openelm(fields: Fields) -> ModelSpec:
    """OpenELM (arXiv 2404.14619): heads and MLP width grow from layer to layer, as three lists say."""
    names = {"hidden_size": "model_dim", "num_hidden_layers": "num_transformer_layers"}
    fields.data = {**fields.data, **{new: fields.data.get(old) for new, old in names.items()}}
    count, h, size = num_layers(fields), hidden(fields), fields.size("head_dim")
    lists = [fields.items(key, length=count) for key in ("num_query_heads", "num_kv_heads", "ffn_multipliers")]
    if any(given is None for given in lists):
        raise InputError(
            "ffn_multipliers, num_query_heads, num_kv_heads: each must be a list with a number for each layer",
            "ffn_multipliers",
        )
    divisor = fields.size("ffn_dim_divisor", default=256)
    normed = "head" if fields.flag("normalize_qk_projections", default=True) else ""
    gated = fields.flag("ffn_with_glu", default=True)

    def layer(query: Any, kv: Any, times: Any) -> Layer:
        if type(query) is not int or type(kv) is not int or not 0 < kv <= query <= 4096 or query % kv:
            raise InputError.of("num_kv_heads", kv, f"it must divide the layer's num_query_heads ({query!r})")
        if type(times) not in (int, float) or not 0 < times <= 64:
            raise InputError.of("ffn_multipliers", times, "each must be a number from 0 to 64")
        mixer = attention(
            fields, normed, sizes=(query, kv, size), modules=("qkv_proj", "qkv_proj", "qkv_proj", "out_proj")
        )
        width = _divisible(times * h, divisor)
        forward = mlp(fields, width=width, gated=gated, activation="silu", modules=("proj_1", "proj_1", "proj_2"))
        return Layer(f"heads_{query}_width_{width}", mixer, forward, norms(fields))

    made = [layer(*sizes) for sizes in zip(*(given or [] for given in lists), strict=True)]
    kinds = {made_.kind: made_ for made_ in made}
    order = {kind: at for at, kind in enumerate(kinds)}
    fields.ignore(
        *names.values(), "activation_fn_name", "normalization_layer_name", "num_gqa_groups", "qkv_multipliers"
    )
    fields.ignore("rope_freq_constant", "rope_max_length", "max_context_length", "num_query_heads", "num_kv_heads")
    tied = fields.flag("share_input_output_layers", default=True)
    stack = Stack(tuple(kinds.values()), tuple(order[made_.kind] for made_ in made))
    spec = assemble(fields, stack, tied=tied)
    return replace(spec, max_position_embeddings=fields.size("max_context_length", default=2048))


def _divisible(value: float, divisor: int) -> int:
    """The nearest multiple of `divisor`, at least one of it, and no more than a tenth below the value."""
    found = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return found + divisor if found < 0.9 * value else found


def rwkv7(fields: Fields) -> ModelSpec:
    """RWKV 7 (arXiv 2503.14456): the first layer has a norm more, and no projection of the value's mix."""
    h, size = dim("h", hidden(fields)), fields.size("head_dim", default=64)
    if h.size % size:
        raise InputError.of("head_dim", size, f"it must divide hidden_size ({h.size})")
    if fields.data.get("attn") or (
        fields.data.get("value_dim") not in (None, h.size) and not isinstance(fields.data.get("value_dim"), list)
    ):
        raise InputError.of(
            "attn", fields.data.get("attn"), "only RWKV's own layers, as wide as the model, are understood"
        )
    ranks = [fields.size(f"{name}_low_rank_dim") for name in ("decay", "gate", "a", "v")]
    width = fields.size_or_none("intermediate_size") or 4 * h.size
    extra = (Weight("mix_key", (h,)),)
    forward = MLP(h.size, width, gated=False, activation="relu2", modules=("", "key", "value"), extra=extra)
    fields.ignore(
        "num_heads", "key_dim", "value_dim", "attn", "attn_mode", "fuse_norm", "fuse_cross_entropy", "hidden_ratio"
    )
    fields.ignore("norm_bias", "norm_first", "hidden_act", "use_l2warp", "fuse_linear_cross_entropy", "norm_eps")

    def layer(first: bool) -> Layer:
        names = ("pre_norm", "attention_norm", "feed_forward_norm")[0 if first else 1 :]
        return Layer(
            "first" if first else "layer",
            _rwkv7_mixer(h, dim("d", size), ranks, first),
            forward,
            norms(fields, *names, **LAYER_NORM),
        )

    stack = Stack((layer(True), layer(False)), (0, *(1,) * (num_layers(fields) - 1)))
    spec = assemble(fields, stack, final_norm=Norm("weight", h, **LAYER_NORM))
    return replace(spec, max_position_embeddings=0)


def _rwkv7_mixer(h: Dim, size: Dim, ranks: list[int], first: bool) -> Recurrence:
    """The generalised delta rule with a decay and a rate for each channel: S <- S (diag(w) + a b^T) + v k^T, o = S r: 9 FLOPs an
    element. The states hold the token before, once for this mix and once for the MLP's."""
    decay, gate, rate, value = (
        dim(letter, size_) for letter, size_ in zip(("r_w", "r_g", "r_a", "r_v"), ranks, strict=True)
    )
    pairs = [("decay", "w_lora", decay, True), ("rate", "a_lora", rate, True), ("gate", "g_lora", gate, False)]
    if not first:
        pairs.append(("value_mix", "v_lora", value, True))
    weights = (
        *(Weight(f"mix_{name}", (h,)) for name in ("receptance", "decay", "key", "value", "rate", "gate")),
        *(Weight(name, (h,)) for name in ("key_norm_scale", "key_rate_scale", "bonus")),
        *(w for name in ("receptance", "key", "value") for w in linear(name, f"{name[0]}_proj", h, h, Split.OUTPUT)),
        *linear("output", "o_proj", h, h, Split.INPUT),
        *(
            w
            for name, module, rank, has_bias in pairs
            for w in (*linear(f"{name}_down", module, rank, h), *linear(f"{name}_up", module, h, rank, bias=has_bias))
        ),
        *Norm("norm", h, **LAYER_NORM).weights,
    )
    memory = h * size
    states = (State("token_before", dim("2", 2) * h), State("wkv_state", memory, "fp32", Split.OUTPUT))
    return Recurrence("rwkv", weights, states, dim("9", 9) * memory + dim("18", 18) * h, dim("12", 12) * h)


def colbert(fields: Fields) -> ModelSpec:
    """ColBERT (arXiv 2112.01488): BERT, and a projection of each token to 128 features."""
    spec = BERT["BertModel"].read(fields)
    size = fields.size("dim", default=128) if fields.has("dim") else 128
    fields.assumptions.append(f"projection = {size} features (ColBERT keeps it in artifact.metadata)")
    projection = Part("projection", linear("linear", "linear", dim("d_c", size), dim("h", spec.hidden_size)))
    return replace(spec, other=(*spec.other, projection))


_HUB = "https://huggingface.co/"
FAMILIES = {
    "OpenELMForCausalLM": Family(openelm, f"{_HUB}apple/OpenELM/blob/main/modeling_openelm.py"),
    "RWKV7ForCausalLM": Family(
        rwkv7, "https://github.com/fla-org/flash-linear-attention/blob/main/fla/models/rwkv7/modeling_rwkv7.py"
    ),
    "HF_ColBERT": Family(
        colbert, "https://github.com/stanford-futuredata/ColBERT/blob/main/colbert/modeling/hf_colbert.py"
    ),
}
