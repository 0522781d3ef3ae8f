"""Dense decoders with rotary positions: Llama and those that differ from it in biases, norms or windows."""

from __future__ import annotations

from calc.model.families.base import Family
from calc.model.families.common import (
    FULL_OR_SLIDING,
    assemble,
    attention,
    dropouts,
    hidden,
    layer_types,
    mlp,
    norms,
    num_layers,
    patterned,
    uniform,
    window,
)
from calc.model.fields import Fields
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Norm, dim

_ATTENTION_DROPOUT = {"attention": "attention_dropout"}


def llama(fields: Fields) -> ModelSpec:
    bias = "qkvo" if fields.flag("attention_bias", default=False) else ""
    feed_forward = mlp(fields, bias=fields.flag("mlp_bias", default=False))
    layer = Layer("layer", attention(fields, bias=bias), feed_forward, norms(fields))
    return assemble(fields, uniform(fields, layer), dropout=dropouts(fields, **_ATTENTION_DROPOUT))


def mistral(fields: Fields) -> ModelSpec:
    size = fields.size_or_none("sliding_window") or 0
    layer = Layer("layer", attention(fields, window=size), mlp(fields), norms(fields))
    return assemble(fields, uniform(fields, layer), dropout=dropouts(fields, **_ATTENTION_DROPOUT))


def _qwen(fields: Fields, bias: str, qk_norm: str) -> ModelSpec:
    size = window(fields)
    first_windowed = fields.size("max_window_layers", default=28, low=0) if size else 0
    default = ["sliding" if size and at >= first_windowed else "full" for at in range(num_layers(fields))]

    def layer(kind: str, width: int) -> Layer:
        return Layer(kind, attention(fields, qk_norm, bias=bias, window=width), mlp(fields), norms(fields))

    fields.ignore("max_window_layers")
    kinds = {"full": lambda: layer("full", 0), "sliding": lambda: layer("sliding", size)}
    layers = patterned(kinds, layer_types(fields, FULL_OR_SLIDING, default))
    return assemble(fields, layers, dropout=dropouts(fields, **_ATTENTION_DROPOUT))


def qwen2(fields: Fields) -> ModelSpec:
    return _qwen(fields, bias="qkv", qk_norm="")


def qwen3(fields: Fields) -> ModelSpec:
    return _qwen(fields, bias="qkvo" if fields.flag("attention_bias", default=False) else "", qk_norm="head")


def phi3(fields: Fields) -> ModelSpec:
    fused = ("qkv_proj", "qkv_proj", "qkv_proj", "o_proj")
    size = fields.size_or_none("sliding_window") or 0
    mixer = attention(fields, modules=fused, window=size, rotary_joined=True)
    feed_forward = mlp(fields, modules=("gate_up_proj", "gate_up_proj", "down_proj"))
    places = {"attention": "attention_dropout", "residual": "resid_pdrop", "embedding": "embd_pdrop"}
    layers = uniform(fields, Layer("layer", mixer, feed_forward, norms(fields)))
    return assemble(fields, layers, dropout=dropouts(fields, **places))


def olmo2(fields: Fields) -> ModelSpec:
    bias = "qkvo" if fields.flag("attention_bias", default=False) else ""
    mixer = attention(fields, "full", "wide", bias=bias)
    names = ("post_attention_norm", "post_feedforward_norm")
    layer = Layer("layer", mixer, mlp(fields), norms(fields, *names, style="wide"))
    final = Norm("weight", dim("h", hidden(fields)), style="wide")
    return assemble(fields, uniform(fields, layer), final_norm=final, dropout=dropouts(fields, **_ATTENTION_DROPOUT))


def gemma(fields: Fields) -> ModelSpec:
    feed_forward = mlp(fields, activation="gelu_pytorch_tanh")
    bias = "qkvo" if fields.flag("attention_bias", default=False) else ""
    layer = Layer("layer", attention(fields, bias=bias), feed_forward, norms(fields, style="gemma"))
    final = Norm("weight", dim("h", hidden(fields)), style="gemma")
    fields.ignore("hidden_act", "hidden_activation", "use_bidirectional_attention")
    return assemble(fields, uniform(fields, layer), tied=True, final_norm=final, embedding_scale=True)


def _gemma_sandwich(
    fields: Fields, every: int, first: int, qk_norm: str, default_window: int, softcap: bool
) -> ModelSpec:
    """Gemma 2 and 3: norms before and after both halves; every `every`-th layer sees all tokens, counting from `first`."""
    size = fields.size("sliding_window", default=default_window)
    names = ("input_norm", "post_attention_norm", "pre_feedforward_norm", "post_feedforward_norm")
    bias = "qkvo" if fields.flag("attention_bias", default=False) else ""
    cap = softcap and fields.number("attn_logit_softcapping", default=50.0) > 0

    def layer(kind: str, width: int) -> Layer:
        mixer = attention(fields, qk_norm, "gemma", bias=bias, window=width, softcap=cap)
        feed_forward = mlp(fields, activation=fields.text("hidden_activation", default="gelu_pytorch_tanh"))
        return Layer(kind, mixer, feed_forward, norms(fields, *names, style="gemma"))

    fields.ignore("hidden_act", "sliding_window_pattern")
    kinds = {"full": lambda: layer("full", 0), "sliding": lambda: layer("sliding", size)}
    default = ["full" if (at + first) % every == 0 else "sliding" for at in range(num_layers(fields))]
    layers = patterned(kinds, layer_types(fields, FULL_OR_SLIDING, default))
    return assemble(
        fields,
        layers,
        tied=True,
        final_norm=Norm("weight", dim("h", hidden(fields)), style="gemma"),
        embedding_scale=True,
        logit_softcap=softcap and fields.number("final_logit_softcapping", default=30.0) > 0,
        dropout=dropouts(fields, **_ATTENTION_DROPOUT),
    )


def gemma2(fields: Fields) -> ModelSpec:
    return _gemma_sandwich(fields, every=2, first=1, qk_norm="", default_window=4096, softcap=True)


def gemma3(fields: Fields) -> ModelSpec:
    every = fields.size("sliding_window_pattern", default=6)
    return _gemma_sandwich(fields, every=every, first=1, qk_norm="head", default_window=4096, softcap=False)


FAMILIES = {
    "LlamaForCausalLM": Family(llama, "llama"),
    "MistralForCausalLM": Family(mistral, "mistral"),
    "Qwen2ForCausalLM": Family(qwen2, "qwen2"),
    "Qwen3ForCausalLM": Family(qwen3, "qwen3"),
    "Phi3ForCausalLM": Family(phi3, "phi3"),
    "Olmo2ForCausalLM": Family(olmo2, "olmo2"),
    "GemmaForCausalLM": Family(gemma, "gemma"),
    "Gemma2ForCausalLM": Family(gemma2, "gemma2"),
    "Gemma3ForCausalLM": Family(gemma3, "gemma3"),
}
