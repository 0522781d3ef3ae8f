"""Gemma 4's language model: wide heads where a layer sees all tokens, shared KV, inputs by layer, experts next to the MLP."""

from __future__ import annotations

from dataclasses import replace

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.common import (
    assemble,
    attention,
    bias,
    dropouts,
    full_or_sliding,
    heads,
    hidden,
    mlp,
    moe,
    norms,
    num_layers,
)
from calc.model.feed_forward import FeedForward
from calc.model.fields import MOST_LAYERS, Fields
from calc.model.mixers import Attention
from calc.model.spec import Layer, ModelSpec, Stack
from calc.model.weights import Norm, Part, Split, Weight, dim, linear

_POWERED = {"style": "powered"}
_LISTED = {"head_dim", "num_key_value_heads"}
NORMS = ("input_norm", "post_attention_norm", "pre_feedforward_norm", "post_feedforward_norm")
_EXPERT_NORMS = ("post_feedforward_norm_1", "post_feedforward_norm_2", "pre_feedforward_norm_2")


def _mixer(fields: Fields, full: bool, window: int, shares: bool) -> Attention:
    count, kv, head_dim = heads(fields)
    same = fields.flag("attention_k_eq_v", default=False)
    if full:
        head_dim, kv = _global_heads(fields, kv, same)
        if count % kv:
            raise InputError.of("num_global_key_value_heads", kv, f"it must divide num_attention_heads ({count})")
    fields.ignore("num_global_key_value_heads")
    d = dim("d", head_dim)
    return attention(
        fields,
        "head",
        sizes=(count, kv, head_dim),
        norm_traits=_POWERED,
        v_norm=Norm("value_norm", d, style="powered", weight=False),
        bias=bias(fields),
        window=0 if full else window,
        shares_kv=shares,
        key_is_value=same and full,
        causal=fields.data.get("use_bidirectional_attention") != "all",
    )


def _global_heads(fields: Fields, kv: int, same: bool) -> tuple[int, int]:
    """The head size and KV heads of layers that see all tokens: from `per_layer_config` where it is given, which the class itself
    writes, else from the fields of their own."""
    listed = fields.data.get("per_layer_config")
    if listed is None:
        own = fields.size_or_none("num_global_key_value_heads") if same else None
        return fields.size("global_head_dim", default=512), own or kv
    fields.ignore("global_head_dim", "per_layer_config")
    full = {at for at, kind in enumerate(full_or_sliding(fields, 6)[0]) if kind == "full"} | {num_layers(fields) - 1}
    named = isinstance(listed, dict) and all(str(key).isascii() and str(key).isdecimal() for key in listed)
    if not isinstance(listed, dict) or not named or {int(str(key)[:9]) for key in listed} != full:
        raise InputError.of("per_layer_config", listed, "it must give the layers that see all tokens, and no others")
    rows = [*listed.values()]
    if any(row != rows[0] for row in rows) or not isinstance(rows[0], dict) or not {*rows[0]} <= _LISTED:
        raise InputError.of(
            "per_layer_config", rows[0], f"each layer must give the same {' and '.join(sorted(_LISTED))}"
        )
    row = Fields(rows[0], "per_layer_config.")
    return row.size("head_dim", default=heads(fields)[2]), row.size("num_key_value_heads", default=kv)


def unified(fields: Fields) -> ModelSpec:
    """Gemma 4 Unified: the same without experts or inputs by layer."""
    for key in ("hidden_size_per_layer_input", "enable_moe_block"):
        if fields.data.get(key):
            raise InputError.of(key, fields.data[key], "this class builds none")
        fields.ignore(key)
    return gemma4(fields)


def _feed_forward(fields: Fields, double: bool) -> tuple[FeedForward, tuple[str, ...]]:
    """The MLP, with the experts next to it where there are any, and the names of the norms that they add."""
    width = fields.size("intermediate_size") * (2 if double else 1)
    activation = fields.text("hidden_activation", default="gelu_pytorch_tanh")
    plain = mlp(fields, width=width, activation=activation)
    if not fields.flag("enable_moe_block", default=False):
        return plain, ()
    scales = (
        Weight("scale", (dim("h", hidden(fields)),)),
        Weight("expert_scale", (dim("E", fields.size("num_experts")),)),
    )
    made = moe(fields, shared=plain, router_extra=scales, activation=activation)
    return replace(made, apart=True), _EXPERT_NORMS


def _layer(fields: Fields, kind: str, window: int, shares: bool) -> Layer:
    double = shares and fields.flag("use_double_wide_mlp", default=False)
    forward, names = _feed_forward(fields, double)
    mixer = _mixer(fields, kind == "full", window, shares)
    name = f"{kind}_shared" if shares else kind
    return Layer(name, mixer, forward, norms(fields, *NORMS, *names, **_POWERED), extra=per_layer_input(fields))


def per_layer_input(fields: Fields) -> tuple[Part, ...]:
    """What adds the layer's own input to its output; nothing where the config gives it no width."""
    narrow = fields.size("hidden_size_per_layer_input", default=0, low=0)
    if not narrow:
        return ()
    h, n = dim("h", hidden(fields)), dim("h_l", narrow)
    gate = linear("gate", "per_layer_input_gate", n, h)
    up = linear("projection", "per_layer_projection", h, n)
    return (Part("per_layer_input", (*gate, *up, *Norm("norm", h, style="powered").weights)),)


def per_layer_tables(fields: Fields) -> tuple[tuple[Weight, ...], tuple[Part, ...]]:
    """The embedding that gives each layer its own input, and its projection from the first hidden state."""
    narrow = fields.size("hidden_size_per_layer_input", default=0, low=0)
    rows = fields.size("vocab_size_per_layer_input", default=262144)
    if not narrow:
        return (), ()
    all_layers, h = dim("L", num_layers(fields)) * dim("h_l", narrow), dim("h", hidden(fields))
    table = Weight("per_layer", (dim("V_l", rows), all_layers), Split.VOCAB, "embed_tokens_per_layer")
    projection = linear("projection", "per_layer_model_projection", all_layers, h)
    return (table,), (
        Part("per_layer_input", (*projection, *Norm("norm", dim("h_l", narrow), style="powered").weights)),
    )


def first_shared(fields: Fields, kinds: list[str]) -> int:
    """The first layer that takes its keys and values from an earlier layer of its kind."""
    shared = fields.size("num_kv_shared_layers", default=0, low=0, high=MOST_LAYERS)
    first = len(kinds) - shared
    if shared and (first < 1 or {*kinds[:first]} != {*kinds}):
        raise InputError.of("num_kv_shared_layers", shared, "each kind of layer must come before the shared ones")
    return first


def gemma4(fields: Fields) -> ModelSpec:
    kinds, window = full_or_sliding(fields, 6)
    kinds[-1] = "full"
    first = first_shared(fields, kinds)
    pairs = [(kind, at >= first) for at, kind in enumerate(kinds)]
    present = list(dict.fromkeys(pairs))
    layers = Stack(
        tuple(_layer(fields, kind, window, shares) for kind, shares in present),
        tuple(present.index(pair) for pair in pairs),
    )
    tables, other = per_layer_tables(fields)
    fields.ignore("per_layer_config", "use_double_wide_mlp", "use_bidirectional_attention", "global_head_dim")
    return assemble(
        fields,
        layers,
        tied=True,
        final_norm=Norm("weight", dim("h", hidden(fields)), style="powered"),
        embeddings=tables,
        other=other,
        embedding_scale=True,
        logit_softcap=fields.number("final_logit_softcapping", default=0.0) > 0,
        dropout=dropouts(fields, attention="attention_dropout"),
    )


FAMILIES = {
    "Gemma4ForCausalLM": Family(gemma4, "gemma4"),
    "Gemma4UnifiedForCausalLM": Family(unified, "gemma4_unified"),
}
