"""DeepSeek-V4: attention over a window and over compressed entries, and a residual of several streams."""

from __future__ import annotations

from dataclasses import replace

from calc.errors import InputError
from calc.model.families import multi_token_prediction
from calc.model.families.base import Family
from calc.model.families.common import assemble, dropouts, hidden, mlp, moe, norms, num_layers
from calc.model.fields import Fields
from calc.model.mixers import CompressedAttention, Indexer
from calc.model.spec import Layer, ModelSpec, Stack
from calc.model.weights import Dim, Norm, Part, Weight, dim, linear

# kind -> (name in layer_types, default tokens an entry)
_KINDS = {
    "window": ("sliding_attention", 0),
    "sparse": ("compressed_sparse_attention", 4),
    "heavy": ("heavily_compressed_attention", 128),
}
_RATIO = {0: "window", 4: "sparse", 128: "heavy"}


def _layer_kinds(fields: Fields) -> list[str]:
    """The kind of each layer: `layer_types`, else `compress_ratios` (which counts the prediction layer too), else two heavy ones
    and then sparse and heavy in turn."""
    count = num_layers(fields)
    names = {name: kind for kind, (name, _) in _KINDS.items()}
    types, ratios = fields.items("layer_types"), fields.items("compress_ratios")
    if types is not None:
        if len(types) < count or not all(isinstance(value, str) and value in names for value in types):
            raise InputError.of("layer_types", types, f"it must name {count} layers, each one of {', '.join(names)}")
        return [names[value] for value in types[:count]]
    if ratios is not None:
        if len(ratios) < count or not all(isinstance(value, int) and value in _RATIO for value in ratios):
            raise InputError.of("compress_ratios", ratios, f"it must have {count} numbers, each 0, 4 or 128")
        return [_RATIO[value] for value in ratios[:count]]
    return ["heavy" if at < 2 or at % 2 == 0 else "sparse" for at in range(count)]


def _rate(fields: Fields, kind: str) -> int:
    name, default = _KINDS[kind]
    rates = fields.data.get("compress_rates")
    fields.ignore("compress_rates")
    value = rates.get(name, default) if isinstance(rates, dict) else default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65536:
        raise InputError.of(f"compress_rates.{name}", value, "it must be a whole number from 1 to 65536")
    return value


def _compressor(fields: Fields, size: Dim, rate: int, series: int, letter: str) -> tuple[Weight, ...]:
    """The weights that make an entry from `rate` tokens; two overlapping series where `series` is 2."""
    wide = size if series == 1 else dim("2", 2) * size
    h = dim("h", hidden(fields))
    return (
        *linear("key_value", "kv_proj", wide, h),
        *linear("gate", "gate_proj", wide, h),
        Weight("position_bias", (dim(letter, rate), wide)),
        *Norm("norm", size, style="wide").weights,
    )


def _indexer(fields: Fields, rate: int) -> Indexer:
    count, size = fields.size("index_n_heads", default=64), fields.size("index_head_dim", default=128)
    width, h = dim("d_i", size), dim("h", hidden(fields))
    weights = (
        *_compressor(fields, width, rate, 2, "m"),
        *linear("query", "q_b_proj", dim("a_i", count) * width, dim("r_q", fields.size("q_lora_rank"))),
        *linear("head_weights", "weights_proj", dim("a_i", count), h),
    )
    return Indexer(count, size, fields.size("index_topk", default=512), weights)


def _mixer(fields: Fields, kind: str) -> CompressedAttention:
    count, size = fields.size("num_attention_heads"), fields.size("head_dim")
    groups = fields.size("o_groups")
    if (count * size) % groups:
        raise InputError(f"o_groups ({groups}) must divide num_attention_heads x head_dim ({count * size})", "o_groups")
    rate = _rate(fields, kind) if kind != "window" else 0
    compressor = _compressor(fields, dim("d", size), rate, 2 if kind == "sparse" else 1, "m") if rate else ()
    return CompressedAttention(
        hidden(fields),
        count,
        size,
        fields.size("q_lora_rank"),
        groups,
        fields.size("o_lora_rank"),
        fields.size("sliding_window", default=128),
        rate,
        compressor,
        _indexer(fields, rate) if kind == "sparse" else None,
    )


def _streams(fields: Fields, streams: int) -> tuple[Part, ...]:
    """Manifold-constrained hyper-connections (arXiv 2512.24880): what mixes the streams around each half of a layer."""
    n, h = dim("n", streams), dim("h", hidden(fields))
    mixes = (dim("2", 2) + n) * n
    weights = []
    for half in ("attention", "mlp"):
        weights += [
            Weight(f"{half}_mixer", (mixes, n * h), matmul=True),
            Weight(f"{half}_base", (mixes,)),
            Weight(f"{half}_scale", (dim("3", 3),)),
        ]
    return (Part("streams", tuple(weights)),)


def deepseek_v4(fields: Fields) -> ModelSpec:
    kinds = _layer_kinds(fields)
    streams = fields.size("hc_mult", default=4, high=64)
    if (shared := fields.size("n_shared_experts", default=1, low=0)) != 1:
        raise InputError.of("n_shared_experts", shared, "the class builds exactly one")
    one = mlp(
        fields, "moe_intermediate_size", "intermediate_size", letter="f_s", bias=fields.flag("mlp_bias", default=False)
    )
    feed_forward = moe(fields, width=("moe_intermediate_size", "intermediate_size"), shared=one)
    present = list(dict.fromkeys(kinds))

    def layer(kind: str) -> Layer:
        norm = norms(fields, style="wide")
        return Layer(kind, _mixer(fields, kind), feed_forward, norm, extra=_streams(fields, streams))

    n, h = dim("n", streams), dim("h", hidden(fields))
    collapse = Part(
        "stream_head", (Weight("mixer", (n, n * h), matmul=True), Weight("base", (n,)), Weight("scale", (dim("1", 1),)))
    )
    fields.ignore("num_key_value_heads", "qk_rope_head_dim", "num_nextn_predict_layers", "compress_rope_theta")
    last = layer(_prediction_kind(fields, len(kinds)))  # it collapses the streams for itself
    fields.ignore("hc_sinkhorn_iters", "hc_eps", "num_hash_layers", "mlp_layer_types", "swiglu_limit", "expert_dtype")
    fields.ignore("attention_bias")
    spec = assemble(
        fields,
        Stack(tuple(map(layer, present)), tuple(present.index(kind) for kind in kinds)),
        final_norm=Norm("weight", h, style="wide"),
        other=(collapse,),
        dropout=dropouts(fields, attention="attention_dropout"),
    )
    return multi_token_prediction.with_prediction(
        spec, multi_token_prediction.count(fields), replace(last, extra=(*last.extra, collapse))
    )


def _prediction_kind(fields: Fields, count: int) -> str:
    """The kind of the prediction layer: what `compress_ratios` says after the model's own layers, else a window."""
    ratios = fields.items("compress_ratios") or []
    after = ratios[count] if len(ratios) > count else 0
    if isinstance(after, bool) or not isinstance(after, int) or after not in _RATIO:
        raise InputError.of("compress_ratios", after, "each must be 0, 4 or 128")
    return _RATIO[after]


FAMILIES = {"DeepseekV4ForCausalLM": Family(deepseek_v4, "deepseek_v4")}
