"""Mixtures of experts over the attention of `dense`: each differs by its traits and by how its experts are laid out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from calc.errors import InputError
from calc.model.families import multi_token_prediction
from calc.model.families.base import Family
from calc.model.families.common import EXPERTS, LAYER_NORM, bias, heads, hidden, mlp, moe, num_layers
from calc.model.families.llama_variants import PRE, SANDWICH, Traits, build, dense_mlp
from calc.model.feed_forward import MLP, FeedForward
from calc.model.fields import MOST_LAYERS, Fields
from calc.model.spec import ModelSpec
from calc.model.weights import Split, Weight, dim, linear

MLP_TYPES = {"dense": "dense", "sparse": "moe"}


@dataclass(frozen=True, slots=True)
class Experts:
    """How experts are laid out. `shared_count` names how many shared experts (of `shared_width` wide each) join the routed
    ones; `shared_total` their whole width instead. `pattern` gives the kind of each layer."""

    width: tuple[str, ...] = ("moe_intermediate_size",)
    shared_count: str = ""
    shared_total: str = ""
    shared_gate: bool = False
    bias_flag: str = ""
    router_bias: str = ""  # the name of a learned correction of the router's scores, where it is a parameter
    dense_width: tuple[str, ...] = ("intermediate_size",)
    pattern: Callable[[Fields], list[str]] = lambda fields: ["moe"] * num_layers(fields)


def sparse(traits: Traits, experts: Experts) -> Callable[[Fields], ModelSpec]:
    """The reader of a decoder with these traits and experts."""

    def read(fields: Fields) -> ModelSpec:
        def routed() -> FeedForward:
            extra: tuple[Weight, ...] = ()
            if experts.router_bias:
                extra = (Weight(experts.router_bias, (dim("E", fields.size(*EXPERTS)),)),)
            return moe(
                fields,
                width=experts.width,
                shared=shared_expert(fields, experts),
                shared_gate=experts.shared_gate,
                router_extra=extra,
            )

        forwards: dict[str, Callable[[], FeedForward]] = {
            "moe": routed,
            "dense": lambda: dense_mlp(fields, traits, *experts.dense_width),
        }
        fields.ignore(*experts.dense_width)
        return build(fields, traits, forwards, experts.pattern(fields))

    return read


def shared_expert(fields: Fields, experts: Experts) -> MLP | None:
    """The MLP that serves every token, or None where its count or width is zero."""
    if experts.shared_total:
        width = fields.size(experts.shared_total, default=0, low=0)
    elif experts.shared_count:
        count = fields.size(experts.shared_count, default=0, low=0, high=1024)
        width = count * fields.size(*experts.width) if count else 0
    else:
        return None
    has_bias = bool(experts.bias_flag) and fields.flag(experts.bias_flag, default=False)
    return mlp(fields, width=width, letter="f_s", bias=has_bias) if width else None


def first_dense(key: str = "first_k_dense_replace", default: int = 0) -> Callable[[Fields], list[str]]:
    """The first layers dense, by `mlp_layer_types` or by their number."""

    def pattern(fields: Fields) -> list[str]:
        count = num_layers(fields)
        types = fields.items("mlp_layer_types", length=count)
        if types is not None:
            fields.ignore(key)
            if not all(isinstance(value, str) and value in MLP_TYPES for value in types):
                raise InputError.of("mlp_layer_types", types, f"each must be one of {', '.join(MLP_TYPES)}")
            return [MLP_TYPES[value] for value in types]
        first = fields.size(key, low=0, high=MOST_LAYERS) if fields.has(key) or key in fields.defaults else default
        return ["dense" if at < first else "moe" for at in range(count)]

    return pattern


def marked(fields: Fields) -> list[str]:
    """EXAONE-MoE: the layers that `is_moe_layer` marks, else all but the first ones."""
    given = fields.items("is_moe_layer", length=num_layers(fields))
    if given is None:
        return first_dense()(fields)
    fields.ignore("first_k_dense_replace")
    if not all(type(value) is bool for value in given):
        raise InputError.of(fields.name("is_moe_layer"), given, "each must be true or false")
    return ["moe" if value else "dense" for value in given]


def every_step(only_default: tuple[int, ...] = ()) -> Callable[[Fields], list[str]]:
    """Qwen's way: dense where `mlp_only_layers` names the layer or `decoder_sparse_step` skips it."""

    def pattern(fields: Fields) -> list[str]:
        step = fields.size("decoder_sparse_step", default=1)
        only = fields.items("mlp_only_layers")
        only = list(only_default) if only is None else only
        if not all(isinstance(at, int) for at in only):
            raise InputError.of(fields.name("mlp_only_layers"), only, "it must be a list of layer numbers")
        return ["moe" if at not in only and (at + 1) % step == 0 else "dense" for at in range(num_layers(fields))]

    return pattern


def ernie_pattern(fields: Fields) -> list[str]:
    """ERNIE 4.5: experts from one layer to another, every so many layers."""
    count = num_layers(fields)
    start = fields.size("moe_layer_start_index", default=1, low=0, high=MOST_LAYERS)
    end = fields.size("moe_layer_end_index", default=-1, low=-1, high=MOST_LAYERS)
    step = fields.size("moe_layer_interval", default=1)
    last = count - 1 if end == -1 else end
    return ["moe" if (at + 1) % step == 0 and start <= at <= last else "dense" for at in range(count)]


def _gate(fields: Fields, module: str = "gate_proj") -> tuple[Weight, ...]:
    """An output gate with its own projection, as wide as all query heads."""
    count, _, head_dim = heads(fields)
    return linear("gate", module, dim("a", count) * dim("d", head_dim), dim("h", hidden(fields)), Split.OUTPUT)


def _gated(traits: Traits, experts: Experts) -> Callable[[Fields], ModelSpec]:
    def read(fields: Fields) -> ModelSpec:
        return sparse(replace(traits, attention={**traits.attention, "extra": _gate(fields)}), experts)(fields)

    return read


def glm4_moe(fields: Fields) -> ModelSpec:
    qk = "head" if fields.flag("use_qk_norm", default=False) else ""
    sizes = {}
    if not fields.has("head_dim"):  # the class rounds down where the heads do not divide
        count = fields.size("num_attention_heads")
        sizes["sizes"] = (count, fields.size("num_key_value_heads", default=count), max(1, hidden(fields) // count))
    traits = Traits(flag_letters="qkv", qk_norm=qk, attention=sizes)
    spec = sparse(traits, Experts(shared_count="n_shared_experts", pattern=first_dense()))(fields)
    return multi_token_prediction.with_prediction(spec, multi_token_prediction.count(fields), copies=True)


def ernie4_5_moe(fields: Fields) -> ModelSpec:
    traits = Traits(
        bias_flag="use_bias", mlp_bias_flag="use_bias", tied=True, model={"head_bias": bool(bias(fields, "use_bias"))}
    )
    experts = Experts(
        shared_count="moe_num_shared_experts",
        bias_flag="use_bias",
        router_bias="score_correction",
        pattern=ernie_pattern,
    )
    return sparse(traits, experts)(fields)


def olmoe(fields: Fields) -> ModelSpec:
    """OLMoE, whose query and key norms are as wide as the hidden state's heads."""
    count, _, head_dim = heads(fields)
    if count * head_dim != hidden(fields):
        rule = f"times num_attention_heads ({count}) it must be hidden_size ({hidden(fields)})"
        raise InputError.of("head_dim", head_dim, rule)
    return sparse(Traits(qk_norm="full"), Experts(width=("intermediate_size",)))(fields)


def phimoe(fields: Fields) -> ModelSpec:
    has_bias = fields.flag("lm_head_bias", default=False)
    traits = Traits(norm=LAYER_NORM, windows=(0, 1), model={"head_bias": has_bias})
    fields.ignore("input_jitter_noise")
    return sparse(traits, Experts(width=("intermediate_size",)))(fields)


def dots1(fields: Fields) -> ModelSpec:
    """dots.llm1: layers from `max_window_layers` on have a window where the config names no kinds."""
    count, first = num_layers(fields), fields.size("max_window_layers", default=MOST_LAYERS, low=0)
    if not fields.has("layer_types") and fields.has("sliding_window") and first < count:
        kinds = ["sliding_attention" if at >= first else "full_attention" for at in range(count)]
        fields.data = {**fields.data, "layer_types": kinds}
    experts = Experts(shared_count="n_shared_experts", pattern=first_dense())
    return sparse(Traits(qk_norm="head", windows=(1, 0)), experts)(fields)


def beam(fields: Fields) -> ModelSpec:
    """Beam: sandwich norms and a gated output whose gate has one bias a head."""
    extra = (*_gate(fields), Weight("gate_bias", (dim("a", heads(fields)[0]),), Split.OUTPUT))
    traits = Traits(qk_norm="head", norms=SANDWICH, attention={"extra": extra}, windows=(6, 1))
    return sparse(traits, Experts(pattern=first_dense(default=3)))(fields)


def laguna(fields: Fields) -> ModelSpec:
    """Laguna: one output gate a head (or an element), and a learned correction of the router."""
    count = heads(fields)[0]
    by_layer = fields.items("num_attention_heads_per_layer", length=num_layers(fields))
    if by_layer and any(value != count for value in by_layer):
        raise InputError.of("num_attention_heads_per_layer", by_layer, f"only {count} in every layer is understood")
    gating = fields.data.get("gating", True)
    fields.ignore("gating")
    if gating is not True:
        raise InputError.of("gating", gating, "only true (one gate a head) is understood")
    extra = linear("gate", "g_proj", dim("a", count), dim("h", hidden(fields)), Split.OUTPUT)
    traits = Traits(qk_norm="head", attention={"extra": extra}, windows=(1, 0))
    experts = Experts(
        shared_total="shared_expert_intermediate_size", router_bias="score_correction", pattern=first_dense(default=1)
    )
    return sparse(traits, experts)(fields)


def cohere2_moe(fields: Fields) -> ModelSpec:
    """Command A's mixture: experts next to attention on one norm."""
    if fields.size("num_shared_experts", default=0, low=0):
        raise InputError.of("num_shared_experts", fields.data.get("num_shared_experts"), "only 0 is understood")
    pattern = first_dense()(fields)
    if "dense" in pattern:
        raise InputError.of("mlp_layer_types", pattern, "only sparse layers are understood")
    norm = {"kind": "layer", "style": "wide"}
    traits = Traits(
        norms=("input_norm",),
        norm=norm,
        tied=True,
        parallel=True,
        windows=(4, 1),
        nope=True,
        model={"head_scale": True},
    )
    fields.ignore("prefix_dense_sliding_window_pattern", "prefix_dense_intermediate_size", "sliding_window_pattern")
    return sparse(traits, Experts(width=("intermediate_size",)))(fields)


_WIDE = {"style": "wide"}
_GRANITE = {"embedding_scale": True, "head_scale": True}
_SHARED_TOTAL = "shared_intermediate_size"

FAMILIES = {
    "AfmoeForCausalLM": Family(
        _gated(
            Traits(qk_norm="head", norms=SANDWICH, windows=(4, 1), nope=True),
            Experts(
                shared_count="num_shared_experts",
                router_bias="score_correction",
                pattern=first_dense("num_dense_layers", 1),
            ),
        ),
        "afmoe",
    ),
    "AriaTextForCausalLM": Family(
        sparse(
            Traits(),
            Experts(width=("intermediate_size",), shared_count="moe_num_shared_experts", bias_flag="mlp_bias"),
        ),
        "aria",
    ),
    "BeamForCausalLM": Family(beam, "beam"),
    "Cohere2MoeForCausalLM": Family(cohere2_moe, "cohere2_moe"),
    "Dots1ForCausalLM": Family(dots1, "dots1"),
    "Ernie4_5_MoeForCausalLM": Family(ernie4_5_moe, "ernie4_5_moe"),
    "ExaoneMoeForCausalLM": Family(
        sparse(
            Traits(bias_flag="", qk_norm="head", windows=(4, 1), nope=True),
            Experts(shared_count="num_shared_experts", pattern=marked),
        ),
        "exaone_moe",
    ),
    "FlexOlmoForCausalLM": Family(
        sparse(
            Traits(qk_norm="full", qk=_WIDE, norms=("post_attention_norm", "post_feedforward_norm"), norm=_WIDE),
            Experts(width=("intermediate_size",)),
        ),
        "flex_olmo",
    ),
    "FlintForCausalLM": Family(
        sparse(
            Traits(qk_norm="head", attention={"sinks": True}, windows=(4, 3), nope=True),
            Experts(shared_total="shared_expert_intermediate_size", pattern=every_step((0, 1))),
        ),
        "flint",
    ),
    "Glm4MoeForCausalLM": Family(glm4_moe, "glm4_moe"),
    "GraniteMoeForCausalLM": Family(
        sparse(Traits(model=_GRANITE), Experts(width=("intermediate_size",))), "granitemoe"
    ),
    "GraniteMoeSharedForCausalLM": Family(
        sparse(Traits(model=_GRANITE), Experts(width=("intermediate_size",), shared_total=_SHARED_TOTAL)),
        "granitemoeshared",
    ),
    "GraniteMoeSWAForCausalLM": Family(
        sparse(
            Traits(attention={"sinks": True}, windows=(4, 0), model=_GRANITE),
            Experts(width=("intermediate_size",), shared_total=_SHARED_TOTAL),
        ),
        "granitemoe_swa",
    ),
    "HYV3ForCausalLM": Family(
        sparse(
            Traits(mlp_bias_flag="mlp_bias", qk_norm="head"),
            Experts(shared_count="num_shared_experts", bias_flag="mlp_bias", pattern=first_dense(default=1)),
        ),
        "hy_v3",
    ),
    "Kolibri1ForCausalLM": Family(
        sparse(
            Traits(bias_flag="", qk_norm="head", norms=SANDWICH, windows=(5, 1), nope=True),
            Experts(shared_total="shared_expert_intermediate_size"),
        ),
        "kolibri1",
    ),
    "LagunaForCausalLM": Family(laguna, "laguna"),
    "MellumForCausalLM": Family(
        sparse(Traits(qk_norm="head", windows=(1, 0)), Experts(pattern=first_dense())), "mellum"
    ),
    "MiniMaxM2ForCausalLM": Family(
        sparse(Traits(bias_flag="", qk_norm="full"), Experts(width=("intermediate_size",))), "minimax_m2"
    ),
    "OlmoeForCausalLM": Family(olmoe, "olmoe"),
    "PhimoeForCausalLM": Family(phimoe, "phimoe"),
    "Qwen2MoeForCausalLM": Family(
        sparse(
            Traits(bias_flag="qkv_bias", flag_letters="qkv"),
            Experts(shared_total="shared_expert_intermediate_size", shared_gate=True, pattern=every_step()),
        ),
        "qwen2_moe",
    ),
    "SolarOpenForCausalLM": Family(
        sparse(Traits(flag_letters="qkv", norms=PRE), Experts(shared_count="n_shared_experts")), "solar_open"
    ),
}
