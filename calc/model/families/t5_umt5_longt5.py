"""T5 and its kin: mT5, UMT5 and LongT5, whole, with another head, or as the encoder alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.common import dropouts, storage_dtype
from calc.model.families.task_heads import labels
from calc.model.feed_forward import MLP
from calc.model.fields import MOST_LAYERS, Fields
from calc.model.mixers import Attention
from calc.model.spec import Layer, ModelSpec, Stack, Tower
from calc.model.weights import Norm, Part, Split, Weight, dim, linear


@dataclass(frozen=True, slots=True)
class Traits:
    """What sets one of T5's kin apart. `every_layer`: each layer has its own table of relative positions, not the first alone."""

    every_layer: bool = False


def _attention(fields: Fields, *, causal: bool, relative: bool = False, tables: tuple[str, ...] = ()) -> Attention:
    """T5's attention: no scaling, no rotation, and a learned bias by distance that later layers add as well. `tables`: more of them."""
    width, count, size = fields.size("d_model"), fields.size("num_heads"), fields.size("d_kv", "head_dim")
    buckets = dim("B", fields.size("relative_attention_num_buckets", default=32))
    names = (("relative_bias",) if relative else ()) + tables
    extra = tuple(Weight(name, (buckets, dim("a", count)), Split.NONE) for name in names)
    modules = ("q", "k", "v", "o")
    return Attention(width, count, count, size, size, modules=modules, causal=causal, rotary=False, extra=extra)


def _mlp(fields: Fields) -> MLP:
    kind = fields.text("feed_forward_proj", default="relu")
    gated, _, name = kind.rpartition("-")
    if gated not in ("", "gated"):
        raise InputError.of("feed_forward_proj", kind, 'it must be an activation, or "gated-" and an activation')
    if fields.flag("is_gated_act", default=bool(gated)) != bool(gated) if fields.has("is_gated_act") else False:
        raise InputError.of("is_gated_act", fields.data["is_gated_act"], f"feed_forward_proj is {kind!r}")
    modules = ("wi_0", "wi_1", "wo") if gated else ("", "wi", "wo")
    activation = "gelu_new" if kind == "gated-gelu" else name
    return MLP(fields.size("d_model"), fields.size("d_ff"), bool(gated), False, activation, modules)


def _stack(fields: Fields, count: int, traits: Traits, *, decoder: bool) -> Stack:
    h, feed_forward = dim("h", fields.size("d_model")), _mlp(fields)
    transient = not decoder and _transient(fields)
    middle = ("cross_attention_norm",) if decoder else ("side_norm",) if transient else ()
    norms = tuple(Norm(name, h) for name in ("input_norm", *middle, "post_attention_norm"))
    cross = _attention(fields, causal=False) if decoder else None

    def layer(name: str) -> Layer:
        own = name == "first" or traits.every_layer
        tables = ("global_relative_bias",) if own and transient else ()
        mixer = _attention(fields, causal=decoder, relative=own, tables=tables)
        return Layer(name, mixer, feed_forward, norms, cross=cross)

    if traits.every_layer:
        return Stack((layer("layer"),), (0,) * count)
    return (
        Stack((layer("first"), layer("rest")), (0,) + (1,) * (count - 1))
        if count > 1
        else Stack((layer("first"),), (0,))
    )


def _transient(fields: Fields) -> bool:
    """Whether LongT5's encoder also reads the sums of blocks ("transient-global")."""
    kind = fields.text("encoder_attention_type", default="local") if fields.has("encoder_attention_type") else "local"
    if kind not in ("local", "transient-global"):
        raise InputError.of("encoder_attention_type", kind, "it must be local or transient-global")
    return kind == "transient-global"


def _ignore(fields: Fields) -> None:
    fields.ignore(
        "tie_word_embeddings", "relative_attention_max_distance", "output_past", "n_positions", "dense_act_fn"
    )
    fields.ignore("is_gated_act", "classifier_dropout", "scale_decoder_outputs", "num_decoder_layers", "is_gated")
    fields.ignore("local_radius", "global_block_size", "encoder_attention_type")


def _spec(fields: Fields, layers: Stack, **traits: object) -> ModelSpec:
    h, vocab = dim("h", fields.size("d_model")), fields.size("vocab_size")
    return replace(
        ModelSpec(
            name="",
            architecture="",
            hidden_size=h.size,
            vocab_size=vocab,
            max_position_embeddings=0,
            layers=layers,
            embeddings=(Weight("token", (dim("V", vocab), h), Split.VOCAB, "shared"),),
            final_norm=Norm("weight", h),
            head=(),
            tied=True,
            source="",
            dtype=storage_dtype(fields),
            dropout=dropouts(fields, attention="dropout_rate", residual="dropout_rate", embedding="dropout_rate"),
        ),
        **traits,  # type: ignore[arg-type]
    )


def t5(traits: Traits) -> Callable[[Fields], ModelSpec]:
    """The reader of the whole: the decoder's layers, with the encoder. transformers 5 always ties the head."""

    def read(fields: Fields) -> ModelSpec:
        h = dim("h", fields.size("d_model"))
        layers = fields.size("num_layers", high=MOST_LAYERS)
        depth = fields.size_or_none("num_decoder_layers", high=MOST_LAYERS) or layers
        norm = Part("norms", Norm("final_norm", h).weights)
        encoder = Tower("encoder", _stack(fields, layers, traits, decoder=False), (norm,))
        head = fields.size("vocab_size") * h.size
        own_head = fields.data.get("tie_word_embeddings") is False
        note = (
            f"the config unties the head, and its checkpoint holds one of {head:,} parameters; transformers 5 ties it",
        )
        _ignore(fields)
        stack = _stack(fields, depth, traits, decoder=True)
        return _spec(fields, stack, towers=(encoder,), notes=note if own_head else ())

    return read


def encoder_alone(traits: Traits, *, classes: bool = False) -> Callable[[Fields], ModelSpec]:
    """The reader of the encoder (sentence-t5, GTR, Instructor, the text encoder of diffusion models), or with a layer over classes."""

    def read(fields: Fields) -> ModelSpec:
        layers = fields.size("num_layers", high=MOST_LAYERS)
        _ignore(fields)
        count, h = labels(fields) if classes else 0, dim("h", fields.size("d_model"))
        head = Part("classifier", linear("output", "classifier", dim("C", count), h, bias=True)) if classes else None
        stack = _stack(fields, layers, traits, decoder=False)
        return _spec(fields, stack, tied=False, has_head=False, other=(head,) if head else ())

    return read


def classified(traits: Traits) -> Callable[[Fields], ModelSpec]:
    """The reader of encoder and decoder with a classifier on the decoder's last token: a dense layer, and one over the classes."""
    whole = t5(traits)

    def read(fields: Fields) -> ModelSpec:
        spec, h = replace(whole(fields), notes=()), dim("h", fields.size("d_model"))
        weights = (
            *linear("dense", "dense", h, h, bias=True),
            *linear("output", "out_proj", dim("C", labels(fields)), h, bias=True),
        )
        return replace(spec, tied=False, has_head=False, other=(Part("classifier", weights),))

    return read


def _kin(name: str, module: str, traits: Traits) -> dict[str, Family]:
    """All classes of one of T5's kin."""
    return {
        f"{name}ForConditionalGeneration": Family(t5(traits), module),
        f"{name}ForSequenceClassification": Family(classified(traits), module),
        f"{name}ForTokenClassification": Family(encoder_alone(traits, classes=True), module),
        f"{name}EncoderModel": Family(encoder_alone(traits), module),
    }


FAMILIES = {
    **_kin("T5", "t5", Traits()),
    **_kin("MT5", "mt5", Traits()),
    **_kin("UMT5", "umt5", Traits(every_layer=True)),
    "LongT5ForConditionalGeneration": Family(t5(Traits()), "longt5"),
    "LongT5EncoderModel": Family(encoder_alone(Traits()), "longt5"),
}
