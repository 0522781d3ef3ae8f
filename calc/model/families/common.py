"""The pieces that most families are made of: each reads its own fields and checks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from calc.errors import InputError
from calc.model.feed_forward import MLP, FeedForward, MoE, router
from calc.model.fields import MOST_LAYERS, Fields
from calc.model.mixers import Attention, LatentAttention, Mixer
from calc.model.spec import Layer, ModelSpec, Stack, Tower
from calc.model.weights import Dim, Norm, Part, Split, Weight, dim, linear

LAYER_NORM: Final[dict[str, Any]] = {"kind": "layer", "style": "native", "bias": True}  # torch's own
CONTEXT = (
    *("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len", "max_sequence_length"),
    *("model_max_length", "context_length"),
)
DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def hidden(fields: Fields) -> int:
    return fields.size("hidden_size", "n_embd", "n_embed", "d_model")


def num_layers(fields: Fields) -> int:
    return fields.size("num_hidden_layers", "n_layer", "n_layers", "num_layers", high=MOST_LAYERS)


def heads(fields: Fields, kv_default: int | None = None) -> tuple[int, int, int]:
    """(num_attention_heads, num_key_value_heads, head_dim): KV heads default to all heads, the head size to hidden/heads."""
    count = fields.size("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
    kv = fields.size_or_none("num_key_value_heads", "n_head_kv") or kv_default or count
    fields.divides("num_key_value_heads", kv, "num_attention_heads", count)
    head_dim = fields.size_or_none("head_dim")
    if head_dim is None:
        fields.divides("num_attention_heads", count, "hidden_size", hidden(fields))
        head_dim = hidden(fields) // count
    return count, kv, head_dim


def whole_heads(fields: Fields) -> tuple[int, int, int]:
    """The same where the class knows neither KV heads nor a head size: whatever the config says of them is not read."""
    count = fields.size("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
    fields.divides("num_attention_heads", count, "hidden_size", hidden(fields))
    return count, count, hidden(fields) // count


def attention(
    fields: Fields,
    qk_norm: str = "",
    norm_style: str = "llama",
    sizes: tuple[int, int, int] | None = None,
    norm_traits: Mapping[str, Any] | None = None,
    **traits: Any,
) -> Attention:
    """Softmax attention from the usual fields. `qk_norm`: "" none, "head" over one head's width, "full" over all heads.

    `sizes` (heads, KV heads, head size) stands in for the usual fields where layers differ.
    """
    count, kv, head_dim = sizes or heads(fields)
    traits.setdefault("v_head_dim", head_dim)
    own = fields.data.get("rotary_dim")  # the older name, in features
    turned = own if type(own) is int else int(head_dim * _rotary_part(fields))
    if 0 < turned < head_dim:
        traits = {"rotary_dim": turned, "rotary_joined": True, **traits}
    if qk_norm:
        d, full = dim("d", head_dim), qk_norm == "full"
        shared = {"style": norm_style, **(norm_traits or {})}
        widths = (dim("a", count) * d, dim("k", kv) * d) if full else (d, d)
        splits = (Split.OUTPUT, Split.KV) if full else (Split.NONE, Split.NONE)
        traits["q_norm"] = Norm("query_norm", widths[0], split=splits[0], **shared)
        traits["k_norm"] = Norm("key_norm", widths[1], split=splits[1], **shared)
    return Attention(hidden(fields), count, kv, head_dim, **traits)


def _rotary_part(fields: Fields) -> float:
    """The part of each head that rotary positions turn, also where transformers 5 writes it."""
    nested = fields.data.get("rope_parameters")
    given = nested.get("partial_rotary_factor") if isinstance(nested, dict) else None
    part = fields.number("partial_rotary_factor", "rotary_pct", default=1.0, high=1.0)
    return float(given) if isinstance(given, int | float) and 0 < given <= 1 else part


def bias(fields: Fields, key: str = "attention_bias", letters: str = "qkvo", default: bool = False) -> str:
    """The letters of the projections that have a bias, by a flag of the config."""
    return letters if fields.flag(key, default=default) else ""


def latent_attention(fields: Fields, **traits: Any) -> LatentAttention:
    """Multi-head latent attention from DeepSeek's fields."""
    return LatentAttention(
        hidden(fields),
        fields.size("num_attention_heads"),
        fields.size_or_none("q_lora_rank") or 0,
        fields.size("kv_lora_rank"),
        fields.size("qk_nope_head_dim"),
        fields.size("qk_rope_head_dim"),
        fields.size("v_head_dim"),
        bias=fields.flag("attention_bias", default=False),
        **traits,
    )


def mlp(fields: Fields, *keys: str, width: int | None = None, **traits: Any) -> MLP:
    """An MLP whose width is read from `keys` ("intermediate_size" when none is given), or is `width`."""
    size = width if width is not None else fields.size(*(keys or ("intermediate_size",)))
    if "activation" not in traits:
        names = ("hidden_act", "hidden_activation", "activation_function", "activation")
        traits["activation"] = fields.text(*names, default="silu")
    return MLP(hidden(fields), size, **traits)


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def moe(
    fields: Fields,
    experts: Sequence[str] = EXPERTS,
    width: Sequence[str] = ("moe_intermediate_size",),
    shared: MLP | None = None,
    shared_gate: bool = False,
    router_bias: bool = False,
    router_extra: tuple[Weight, ...] = (),
    **traits: Any,
) -> MoE:
    """A mixture of experts from the usual fields; the active experts may not outnumber the experts."""
    count, active = fields.size(*experts), fields.size(*TOP_K)
    if active > count:
        raise InputError(
            f"{fields.name('num_experts_per_tok')} ({active}) must be at most {experts[0]} ({count})",
            "num_experts_per_tok",
        )
    traits = {"letter": "f_e", "modules": ("gate_up_proj", "gate_up_proj", "down_proj")} | traits
    expert = mlp(fields, *width, **traits)
    weights = (*router(hidden(fields), count, router_bias), *router_extra)
    return MoE(hidden(fields), count, active, expert, weights, shared, shared_gate)


def norms(fields: Fields, *names: str, **traits: Any) -> tuple[Norm, ...]:
    """Norms over the hidden size; by default one before the mixer and one before the feed-forward."""
    names = names or ("input_norm", "post_attention_norm")
    return tuple(Norm(name, dim("h", hidden(fields)), **traits) for name in names)


def uniform(fields: Fields, layer: Layer) -> Stack:
    """All layers alike."""
    return Stack((layer,), (0,) * num_layers(fields))


def patterned(kinds: dict[str, Callable[[], Layer]], pattern: Sequence[str]) -> Stack:
    """Layers of several kinds in the order of `pattern`; only the kinds that occur are built."""
    present = list(dict.fromkeys(pattern))
    index = {kind: at for at, kind in enumerate(present)}
    return Stack(tuple(kinds[kind]() for kind in present), tuple(index[kind] for kind in pattern))


def combined(
    mixers: Mapping[str, Callable[[], Mixer | None]],
    mixer_pattern: Sequence[str],
    forwards: Mapping[str, Callable[[], FeedForward | None]],
    forward_pattern: Sequence[str],
    norms: tuple[Norm, ...],
    **traits: Any,
) -> Stack:
    """Layers whose mixer and feed-forward vary apart: layer i has the kinds at place i of both patterns.

    What varies names the layer: "sliding", "moe", "sliding_moe"; a stack of equal layers is named "layer".
    """
    made_mixers = {kind: mixers[kind]() for kind in dict.fromkeys(mixer_pattern)}
    made_forwards = {kind: forwards[kind]() for kind in dict.fromkeys(forward_pattern)}
    varying = (len(made_mixers) > 1, len(made_forwards) > 1)

    def layer(kinds: tuple[str, str]) -> Layer:
        name = "_".join(kind for kind, varies in zip(kinds, varying, strict=True) if varies) or "layer"
        return Layer(name, made_mixers[kinds[0]], made_forwards[kinds[1]], norms, **traits)

    pairs = list(zip(mixer_pattern, forward_pattern, strict=True))
    order = {pair: at for at, pair in enumerate(dict.fromkeys(pairs))}
    return Stack(tuple(layer(pair) for pair in order), tuple(order[pair] for pair in pairs))


def layer_types(fields: Fields, allowed: dict[str, str], default: Sequence[str] | None = None) -> list[str]:
    """The kind of each layer from `layer_types`, translated by `allowed`; `default` where the field is missing."""
    count = num_layers(fields)
    found = fields.items("layer_types", length=count)
    if found is None:
        return list(default) if default is not None else [next(iter(allowed.values()))] * count
    for value in found:
        if not isinstance(value, str) or value not in allowed:
            raise InputError.of(fields.name("layer_types"), value, f"each must be one of {', '.join(allowed)}")
    return [allowed[value] for value in found]


FULL_OR_SLIDING = {"full_attention": "full", "sliding_attention": "sliding"}


def full_or_sliding(fields: Fields, every: int, first: int = 1, sliding: bool = True) -> tuple[list[str], int]:
    """The kind of each layer, "full" or "sliding", and the window in tokens: from `layer_types`, else every `every`-th layer
    sees all tokens, counting from `first` (`every` 0: none does). Without a window, or not `sliding`, all layers are full."""
    size = fields.size_or_none("sliding_window") or 0
    count = num_layers(fields)
    default = ["full" if every and (at + first) % every == 0 else "sliding" for at in range(count)]
    kinds = layer_types(fields, FULL_OR_SLIDING, default)
    return (kinds, size) if size and sliding else (["full"] * count, 0)


def window(fields: Fields, default_on: bool = False) -> int:
    """The sliding window in tokens, 0 where there is none or `use_sliding_window` is false."""
    on = (
        fields.flag("use_sliding_window", default=default_on)
        if fields.has("use_sliding_window") or not default_on
        else True
    )
    size = fields.size_or_none("sliding_window")
    return size if on and size else 0


def storage_dtype(fields: Fields) -> str:
    """The config's own storage type; bf16 where it names none."""
    name = fields.data.get("dtype") or fields.data.get("torch_dtype") or "bfloat16"
    return DTYPES.get(str(name).removeprefix("torch."), "bf16")


def position_table(fields: Fields, *keys: str, extra: int = 0, width: int | None = None) -> Weight:
    """A learned table of positions; `extra` rows serve padding."""
    rows = dim("s_{max}", fields.size(*(keys or ("max_position_embeddings", "n_positions", "n_ctx"))) + extra)
    return Weight("position", (rows, dim("h", width or hidden(fields))))


def _context(fields: Fields) -> int:
    """The positions that the model was made for, under the first name that is given; 0 where nothing tells."""
    given = [key for key in CONTEXT if fields.has(key)] or CONTEXT
    return next(filter(None, [fields.size_or_none(key) for key in given]), 0)


def assemble(
    fields: Fields,
    layers: Stack,
    *,
    tied: bool = False,
    never_tied: bool = False,
    final_norm: Norm | None = None,
    no_final_norm: bool = False,
    head_bias: bool = False,
    embeddings: tuple[Weight, ...] = (),
    token: Dim | None = None,
    rows: Dim | None = None,
    vocab_key: str = "vocab_size",
    **traits: Any,
) -> ModelSpec:
    """A decoder around its layers: token embedding, final norm (RMSNorm unless given), head unless tied.

    `tied` is the class's default of tie_word_embeddings; `never_tied` classes have their own head whatever the config says.
    `embeddings` are tables besides the token table (positions); `token` is the width of the token table and the head where it
    is not the hidden size, `rows` the table's rows where they are not the head's; `vocab_key` names the vocabulary's field.
    """
    h, vocab = dim("h", hidden(fields)), dim("V", fields.size(vocab_key))
    tied = fields.flag("tie_word_embeddings", default=tied) and not never_tied
    table = Weight("token", (rows or vocab, token or h), Split.VOCAB, "embed_tokens")
    head = linear("weight", "lm_head", vocab, token or h, Split.VOCAB, head_bias)
    return ModelSpec(
        name="",
        architecture="",
        hidden_size=h.size,
        vocab_size=vocab.size,
        max_position_embeddings=_context(fields),
        layers=layers,
        embeddings=(table, *embeddings),
        final_norm=None if no_final_norm else final_norm or Norm("weight", h),
        head=head[1:] if tied else head,
        tied=tied,
        source="",
        dtype=storage_dtype(fields),
        **traits,
    )


def dropouts(fields: Fields, **keys: str) -> tuple[tuple[str, float], ...]:
    """Dropout probabilities that are above zero, by place: `attention="attn_pdrop"`."""
    found = ((place, fields.number(key, default=0.0, high=1.0)) for place, key in keys.items())
    return tuple((place, probability) for place, probability in found if probability)


def encoder_alone(fields: Fields, tower: Tower, *other: Part) -> ModelSpec:
    """An encoder of pictures or sound as a model of its own: no vocabulary, no positions in a text."""
    mixer = tower.stack.kinds[0].mixer
    assert isinstance(mixer, Attention)  # every encoder's layer attends
    return ModelSpec(
        name="",
        architecture="",
        hidden_size=mixer.hidden_size,
        vocab_size=0,
        max_position_embeddings=0,
        layers=tower.stack,
        embeddings=(),
        final_norm=None,
        head=(),
        tied=False,
        source="",
        has_head=False,
        other=(*tower.parts, *other),
        dtype=storage_dtype(fields),
    )
