"""Encoder-decoders: T5, and the decoders of BART's kin, which transformers also offers alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.common import LAYER_NORM, assemble, dropouts, position_table, uniform
from calc.model.feed_forward import MLP
from calc.model.fields import MOST_LAYERS, Fields
from calc.model.mixers import Attention
from calc.model.spec import Layer, ModelSpec, Stack, Tower
from calc.model.weights import Norm, Part, Split, Weight, convolution, dim, linear


def _t5_attention(fields: Fields, causal: bool, relative: bool = False) -> Attention:
    """T5's attention: no scaling, no rotation, and in the first layer a learned bias by distance that all layers add."""
    width, count, size = fields.size("d_model"), fields.size("num_heads"), fields.size("d_kv", "head_dim")
    buckets = dim("B", fields.size("relative_attention_num_buckets", default=32))
    extra = (Weight("relative_bias", (buckets, dim("a", count)), Split.NONE),) if relative else ()
    modules = ("q", "k", "v", "o")
    return Attention(width, count, count, size, size, modules=modules, causal=causal, rotary=False, extra=extra)


def _t5_mlp(fields: Fields) -> MLP:
    kind = fields.text("feed_forward_proj", default="relu")
    gated, _, name = kind.rpartition("-")
    if gated not in ("", "gated"):
        raise InputError.of("feed_forward_proj", kind, 'it must be an activation, or "gated-" and an activation')
    if fields.flag("is_gated_act", default=bool(gated)) != bool(gated) if fields.has("is_gated_act") else False:
        raise InputError.of("is_gated_act", fields.data["is_gated_act"], f"feed_forward_proj is {kind!r}")
    modules = ("wi_0", "wi_1", "wo") if gated else ("", "wi", "wo")
    activation = "gelu_new" if kind == "gated-gelu" else name
    return MLP(fields.size("d_model"), fields.size("d_ff"), bool(gated), False, activation, modules)


def _t5_stack(fields: Fields, count: int, decoder: bool) -> Stack:
    h, feed_forward = dim("h", fields.size("d_model")), _t5_mlp(fields)
    names = (
        ("input_norm", "cross_attention_norm", "post_attention_norm")
        if decoder
        else ("input_norm", "post_attention_norm")
    )
    norms = tuple(Norm(name, h) for name in names)
    cross = _t5_attention(fields, causal=False) if decoder else None
    first, rest = (
        Layer(name, _t5_attention(fields, decoder, name == "first"), feed_forward, norms, cross=cross)
        for name in ("first", "rest")
    )
    return Stack((first, rest), (0,) + (1,) * (count - 1)) if count > 1 else Stack((first,), (0,))


def t5(fields: Fields) -> ModelSpec:
    """T5 and its v1.1: the decoder's layers, with the encoder. transformers 5 always ties the head."""
    h = dim("h", fields.size("d_model"))
    layers = fields.size("num_layers", high=MOST_LAYERS)
    depth = fields.size_or_none("num_decoder_layers", high=MOST_LAYERS) or layers
    encoder = Tower("encoder", _t5_stack(fields, layers, False), (Part("norms", Norm("final_norm", h).weights),))
    vocab = fields.size("vocab_size")
    own_head = fields.data.get("tie_word_embeddings") is False
    note = (
        f"the config unties the head, and its checkpoint holds one of {vocab * h.size:,} parameters; transformers 5 ties it",
    )
    fields.ignore(
        "tie_word_embeddings", "relative_attention_max_distance", "output_past", "n_positions", "dense_act_fn"
    )
    fields.ignore("is_gated_act", "classifier_dropout", "scale_decoder_outputs", "num_decoder_layers")
    return ModelSpec(
        name="",
        architecture="",
        hidden_size=h.size,
        vocab_size=vocab,
        max_position_embeddings=0,
        layers=_t5_stack(fields, depth, True),
        embeddings=(Weight("token", (dim("V", vocab), h), Split.VOCAB, "shared"),),
        final_norm=Norm("weight", h),
        head=(),
        tied=True,
        source="",
        towers=(encoder,),
        dropout=dropouts(fields, attention="dropout_rate", residual="dropout_rate", embedding="dropout_rate"),
        notes=note if own_head else (),
    )


@dataclass(frozen=True, slots=True)
class Traits:
    """What sets one of BART's kin apart. `offset`: rows of the position table beyond the positions; None: no table."""

    offset: int | None = 0
    embedding_norm: bool = True
    final_norm: bool = False
    bias: str = "qkvo"
    cross: bool = True
    never_tied: bool = False
    positions: str = "max_position_embeddings"


def decoder(traits: Traits) -> Callable[[Fields], ModelSpec]:
    """The reader of a decoder taken from an encoder-decoder: it keeps its attention to the encoder's output."""

    def read(fields: Fields) -> ModelSpec:
        width, count = fields.size("d_model"), fields.size("decoder_attention_heads")
        fields.divides("decoder_attention_heads", count, "d_model", width)
        size = width // count
        h = dim("h", width)
        modules = ("q_proj", "k_proj", "v_proj", "out_proj")
        mixer = Attention(width, count, count, size, size, traits.bias, modules, rotary=False)
        cross = Attention(width, count, count, size, size, traits.bias, modules, causal=False, rotary=False)
        activation = fields.text("activation_function", default="gelu")
        feed_forward = MLP(width, fields.size("decoder_ffn_dim"), False, True, activation, ("", "fc1", "fc2"))
        names = (
            ("attention_norm", "cross_attention_norm", "output_norm")
            if traits.cross
            else ("attention_norm", "output_norm")
        )
        norms = tuple(Norm(name, h, **LAYER_NORM) for name in names)
        layer = Layer("layer", mixer, feed_forward, norms, cross=cross if traits.cross else None)
        embeddings: tuple[Weight, ...] = (
            () if traits.offset is None else (position_table(fields, traits.positions, extra=traits.offset),)
        )
        if traits.embedding_norm:
            embeddings += Norm("norm", h, **LAYER_NORM).weights
        depth = fields.size("decoder_layers", high=MOST_LAYERS)
        _ignore(fields)
        _check(fields)
        return assemble(
            fields,
            Stack((layer,), (0,) * depth),
            tied=True,
            never_tied=traits.never_tied,
            embeddings=embeddings,
            final_norm=Norm("weight", h, **LAYER_NORM),
            no_final_norm=not traits.final_norm,
            dropout=dropouts(fields, attention="attention_dropout", residual="dropout", embedding="dropout"),
        )

    return read


def _check(fields: Fields) -> None:
    """Flags of single classes that change their tensors: only their defaults are understood."""
    wanted = {
        "use_prompt": False,
        "use_bias": False,
        "use_learned_position_embeddings": True,
        "layernorm_embedding": True,
    }
    for key, value in wanted.items():
        if fields.has(key) and fields.flag(key, default=value) != value:
            raise InputError.of(key, fields.data[key], f"only {value} is understood for this class")
    rows = fields.size_or_none("decoder_vocab_size")
    if rows is not None and rows != fields.size("vocab_size"):
        raise InputError.of("decoder_vocab_size", rows, f"it must equal vocab_size ({fields.size('vocab_size')})")
    fields.ignore("share_encoder_decoder_embeddings", "prompt_length", "prompt_mid_dim")


def _ignore(fields: Fields) -> None:
    """The encoder's fields: this class does not build it."""
    fields.ignore(
        "encoder_layers", "encoder_ffn_dim", "encoder_attention_heads", "encoder_layerdrop", "decoder_layerdrop"
    )
    fields.ignore(
        "activation_dropout", "classifier_dropout", "scale_embedding", "num_hidden_layers", "max_source_positions"
    )
    fields.ignore("num_mel_bins", "static_position_embeddings", "normalize_before", "normalize_embedding", "layerdrop")


def opt(fields: Fields) -> ModelSpec:
    """OPT; the 350M model puts norms after each half and projects a narrower embedding in and out."""
    width, count = fields.size("hidden_size"), fields.size("num_attention_heads")
    fields.divides("num_attention_heads", count, "hidden_size", width)
    h, size = dim("h", width), width // count
    has_bias = fields.flag("enable_bias", default=True)
    affine = fields.flag("layer_norm_elementwise_affine", default=True)
    norm: dict[str, Any] = {"kind": "layer", "style": "native", "weight": affine, "bias": affine}
    modules = ("q_proj", "k_proj", "v_proj", "out_proj")
    mixer = Attention(width, count, count, size, size, "qkvo" if has_bias else "", modules, rotary=False)
    activation = fields.text("activation_function", default="relu")
    feed_forward = MLP(width, fields.size("ffn_dim"), False, has_bias, activation, ("", "fc1", "fc2"))
    before = fields.flag("do_layer_norm_before", default=True)
    names = ("input_norm", "post_attention_norm") if before else ("attention_norm", "output_norm")
    layer = Layer("layer", mixer, feed_forward, tuple(Norm(name, h, **norm) for name in names))
    removed = fields.flag("_remove_final_layer_norm", default=False)
    narrow = fields.size_or_none("word_embed_proj_dim") or width
    token = dim("w", narrow)
    projections = (*linear("in", "project_in", h, token), *linear("out", "project_out", token, h))
    fields.ignore("layerdrop", "activation_dropout")
    return assemble(
        fields,
        uniform(fields, layer),
        tied=True,
        token=token if narrow != width else None,
        embeddings=(position_table(fields, extra=2),),
        final_norm=Norm("weight", h, **norm),
        no_final_norm=not before or removed,
        other=(Part("embedding_projections", projections),) if narrow != width else (),
        dropout=dropouts(fields, attention="attention_dropout", residual="dropout"),
    )


def _prenorm_decoder(fields: Fields, width_key: str, positions: int | None) -> ModelSpec:
    """XGLM and BioGPT: pre-norm layers with biases everywhere."""
    width = fields.size("hidden_size", "d_model")
    count = fields.size("num_attention_heads", "attention_heads")
    fields.divides("num_attention_heads", count, "hidden_size", width)
    h, size = dim("h", width), width // count
    modules = ("q_proj", "k_proj", "v_proj", "out_proj")
    mixer = Attention(width, count, count, size, size, "qkvo", modules, rotary=False)
    activation = fields.text("activation_function", "hidden_act", default="gelu")
    feed_forward = MLP(width, fields.size(width_key), False, True, activation, ("", "fc1", "fc2"))
    layer = Layer(
        "layer", mixer, feed_forward, tuple(Norm(name, h, **LAYER_NORM) for name in ("attention_norm", "output_norm"))
    )
    if fields.flag("add_cross_attention", default=False):
        raise InputError.of("add_cross_attention", True, "only false is understood for this class")
    fields.ignore("layerdrop", "activation_dropout", "layer_norm_eps")
    scale = fields.flag("scale_embedding", default=True)
    return assemble(
        fields,
        uniform(fields, layer),
        tied=True,
        embeddings=() if positions is None else (position_table(fields, extra=positions),),
        final_norm=Norm("weight", h, **LAYER_NORM),
        embedding_scale=scale,
    )


def xglm(fields: Fields) -> ModelSpec:
    return _prenorm_decoder(fields, "ffn_dim", None)


def biogpt(fields: Fields) -> ModelSpec:
    return _prenorm_decoder(fields, "intermediate_size", 2)


def whisper(fields: Fields) -> ModelSpec:
    """Whisper (arXiv 2212.04356): the decoder's layers, with the encoder of sound next to them: two convolutions over the mel bins,
    fixed positions, and pre-norm layers."""
    spec = decoder(_WHISPER)(fields)
    width, heads = fields.size("d_model"), fields.size("encoder_attention_heads")
    fields.divides("encoder_attention_heads", heads, "d_model", width)
    h, size, kernel = dim("h", width), width // heads, dim("k", 3)
    modules = ("q_proj", "k_proj", "v_proj", "out_proj")
    mixer = Attention(width, heads, heads, size, size, "qvo", modules, causal=False, rotary=False)
    activation = fields.text("activation_function", default="gelu")
    forward = MLP(width, fields.size("encoder_ffn_dim"), False, True, activation, ("", "fc1", "fc2"))
    names = ("input_norm", "post_attention_norm")
    layer = Layer("layer", mixer, forward, tuple(Norm(name, h, **LAYER_NORM) for name in names))
    bins = dim("m", fields.size("num_mel_bins", default=80))
    front = (
        *convolution("first", "conv1", h, bins * kernel, bias=True),
        *convolution("second", "conv2", h, h * kernel, bias=True),
        Weight("position", (dim("s_a", fields.size("max_source_positions", default=1500)), h)),
    )
    parts = (Part("embedding", front), Part("norms", Norm("final_norm", h, **LAYER_NORM).weights))
    depth = fields.size("encoder_layers", high=MOST_LAYERS)
    fields.ignore(
        "median_filter_width", "use_weighted_layer_sum", "classifier_proj_size", "apply_spec_augment", "alignment_heads"
    )
    fields.ignore(*(key for key in fields.data if key.startswith("mask_")))
    return replace(spec, towers=(Tower("encoder", Stack((layer,), (0,) * depth), parts),))


_WHISPER = Traits(embedding_norm=False, final_norm=True, bias="qvo", positions="max_target_positions")

FAMILIES = {
    "T5ForConditionalGeneration": Family(t5, "t5"),
    "BartForCausalLM": Family(decoder(Traits(offset=2)), "bart"),
    "MBartForCausalLM": Family(decoder(Traits(offset=2, final_norm=True)), "mbart"),
    "MvpForCausalLM": Family(decoder(Traits(offset=2)), "mvp"),
    "PLBartForCausalLM": Family(decoder(Traits(offset=2)), "plbart"),
    "BlenderbotForCausalLM": Family(decoder(Traits(embedding_norm=False, final_norm=True)), "blenderbot"),
    "BlenderbotSmallForCausalLM": Family(decoder(Traits()), "blenderbot_small"),
    "MarianForCausalLM": Family(decoder(Traits(embedding_norm=False)), "marian"),
    "PegasusForCausalLM": Family(decoder(Traits(embedding_norm=False, final_norm=True)), "pegasus"),
    "BigBirdPegasusForCausalLM": Family(decoder(Traits(bias="", never_tied=True)), "bigbird_pegasus"),
    "WhisperForCausalLM": Family(decoder(_WHISPER), "whisper"),
    "WhisperForConditionalGeneration": Family(whisper, "whisper"),
    "TrOCRForCausalLM": Family(decoder(Traits(offset=2)), "trocr"),
    "OPTForCausalLM": Family(opt, "opt"),
    "XGLMForCausalLM": Family(xglm, "xglm"),
    "BioGptForCausalLM": Family(biogpt, "biogpt"),
}
