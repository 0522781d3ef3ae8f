"""BART's kin, whole and as the decoders that transformers also offers alone, Whisper, and OPT and others like such a decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.common import (
    LAYER_NORM,
    assemble,
    dropouts,
    encoder_alone,
    position_table,
    uniform,
)
from calc.model.families.task_heads import labels
from calc.model.feed_forward import MLP
from calc.model.fields import MOST_LAYERS, Fields
from calc.model.mixers import Attention
from calc.model.spec import Layer, ModelSpec, Stack, Tower
from calc.model.weights import Dim, Norm, Part, Weight, convolution, dim, linear


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


def seq2seq(traits: Traits, end: str = "") -> Callable[[Fields], ModelSpec]:
    """The reader of the whole of one of BART's kin: its decoder, with the encoder that shares the token table. `end`: "classes" puts a
    classifier in the place of the head, "span" the beginning and end of an answer, "trunk" nothing."""
    read_decoder = decoder(traits)

    def read(fields: Fields) -> ModelSpec:
        spec, h = read_decoder(fields), dim("h", fields.size("d_model"))
        spec = replace(spec, towers=(_encoder(fields, traits),))
        fields.ignore(
            "add_bias_logits",
            "add_final_layer_norm",
            "extra_pos_embeddings",
            "save_step",
            "force_bos_token_to_be_generated",
        )
        if not end:
            return spec
        other = {
            "classes": (*linear("dense", "dense", h, h, bias=True), *_outputs(labels(fields), h)),
            "span": _outputs(2, h),
            "trunk": (),
        }[end]
        parts = (Part("classifier", other),) if other else ()
        return replace(spec, head=(), tied=False, has_head=False, other=(*spec.other, *parts))

    return read


def _outputs(count: int, h: Dim) -> tuple[Weight, ...]:
    return linear("output", "out_proj", dim("C", count), h, bias=True)


def _encoder(fields: Fields, traits: Traits) -> Tower:
    """The encoder's layers, with its own table of positions and its norms."""
    width, heads = fields.size("d_model"), fields.size("encoder_attention_heads")
    fields.divides("encoder_attention_heads", heads, "d_model", width)
    h, size = dim("h", width), width // heads
    modules = ("q_proj", "k_proj", "v_proj", "out_proj")
    mixer = Attention(width, heads, heads, size, size, traits.bias, modules, causal=False, rotary=False)
    activation = fields.text("activation_function", default="gelu")
    forward = MLP(width, fields.size("encoder_ffn_dim"), False, True, activation, ("", "fc1", "fc2"))
    names = ("attention_norm", "output_norm")
    layer = Layer("layer", mixer, forward, tuple(Norm(name, h, **LAYER_NORM) for name in names))
    tables: tuple[Weight, ...] = () if traits.offset is None else (position_table(fields, extra=traits.offset),)
    if traits.embedding_norm:
        tables += Norm("norm", h, **LAYER_NORM).weights
    parts: tuple[Part, ...] = (Part("embedding", tables),) if tables else ()
    if traits.final_norm:
        parts += (Part("norms", Norm("final_norm", h, **LAYER_NORM).weights),)
    return Tower("encoder", Stack((layer,), (0,) * fields.size("encoder_layers", high=MOST_LAYERS)), parts)


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
    """Whisper (arXiv 2212.04356): the decoder's layers, with the encoder of sound next to them."""
    spec = decoder(_WHISPER)(fields)
    return replace(spec, towers=(_whisper_tower(fields),))


def _whisper_tower(fields: Fields) -> Tower:
    """The encoder of sound: two convolutions over the mel bins, fixed positions, and pre-norm layers."""
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
    return Tower("encoder", Stack((layer,), (0,) * depth), parts)


def whisper_encoder(fields: Fields) -> ModelSpec:
    """The encoder of sound alone, with a projection and a layer over the classes: it has no vocabulary."""
    tower, h = _whisper_tower(fields), dim("h", fields.size("d_model"))
    middle = dim("h_c", fields.size("classifier_proj_size", default=256))
    weighted = fields.data.get("use_weighted_layer_sum") is True
    sums = (Weight("layer_weights", (dim("L_1", len(tower.stack) + 1),)),) if weighted else ()
    weights = (
        *linear("projector", "projector", middle, h, bias=True),
        *linear("output", "classifier", dim("C", labels(fields)), middle, bias=True),
        *sums,
    )
    fields.ignore(*fields.data)  # the decoder's, which this class does not build
    return encoder_alone(fields, tower, Part("classifier", weights))


_WHISPER = Traits(embedding_norm=False, final_norm=True, bias="qvo", positions="max_target_positions")

_KIN = {
    # class, transformers' module, its decoder's traits
    "Bart": ("bart", Traits(offset=2)),
    "MBart": ("mbart", Traits(offset=2, final_norm=True)),
    "Mvp": ("mvp", Traits(offset=2)),
    "PLBart": ("plbart", Traits(offset=2)),
    "Blenderbot": ("blenderbot", Traits(embedding_norm=False, final_norm=True)),
    "BlenderbotSmall": ("blenderbot_small", Traits()),
    "Marian": ("marian", Traits(embedding_norm=False)),
    "Pegasus": ("pegasus", Traits(embedding_norm=False, final_norm=True)),
    "BigBirdPegasus": ("bigbird_pegasus", Traits(bias="", never_tied=True)),
    "M2M100": ("m2m_100", Traits(offset=None, embedding_norm=False, final_norm=True)),
}
_CLASSIFIED = ("Bart", "MBart", "Mvp", "PLBart")  # transformers has ...ForSequenceClassification of these


def _kin() -> Iterator[tuple[str, Family]]:
    """All classes of BART's kin."""
    for name, (module, traits) in _KIN.items():
        whole = "MarianMTModel" if name == "Marian" else f"{name}ForConditionalGeneration"
        yield whole, Family(seq2seq(replace(traits, never_tied=False)), module)
        yield f"{name}Model", Family(seq2seq(traits, "trunk"), module)
        if name != "M2M100":  # its decoder is offered with the encoder alone
            yield f"{name}ForCausalLM", Family(decoder(traits), module)
        if name in _CLASSIFIED:
            yield f"{name}ForSequenceClassification", Family(seq2seq(traits, "classes"), module)
            yield f"{name}ForQuestionAnswering", Family(seq2seq(traits, "span"), module)


FAMILIES = {
    **dict(_kin()),
    "WhisperForCausalLM": Family(decoder(_WHISPER), "whisper"),
    "WhisperForConditionalGeneration": Family(whisper, "whisper"),
    "WhisperModel": Family(lambda fields: replace(whisper(fields), tied=False, has_head=False), "whisper"),
    "WhisperForAudioClassification": Family(whisper_encoder, "whisper"),
    "TrOCRForCausalLM": Family(decoder(Traits(offset=2)), "trocr"),
    "OPTForCausalLM": Family(opt, "opt"),
    "XGLMForCausalLM": Family(xglm, "xglm"),
    "BioGptForCausalLM": Family(biogpt, "biogpt"),
}
