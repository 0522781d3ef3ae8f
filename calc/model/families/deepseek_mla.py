"""Latent attention (MLA) and what grew from it: DeepSeek 2 to 3.2, GLM 5, Youtu, MiniCPM3, LongCat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from calc.errors import InputError
from calc.model.families import multi_token_prediction
from calc.model.families.base import Family
from calc.model.families.common import (
    assemble,
    attention,
    combined,
    dropouts,
    hidden,
    latent_attention,
    mlp,
    moe,
    norms,
    num_layers,
    uniform,
)
from calc.model.families.qwen2_moe_glm_moe import Experts, first_dense, shared_expert
from calc.model.feed_forward import FeedForward, MoE, router
from calc.model.fields import MOST_LAYERS, Fields
from calc.model.mixers import Indexer, Mixer
from calc.model.spec import Layer, ModelSpec, Stack
from calc.model.weights import Norm, Part, dim, linear

_EXPERTS = Experts(shared_count="n_shared_experts")
_DROPOUT = {"attention": "attention_dropout"}


def indexer(fields: Fields) -> Indexer:
    """The sparse-attention indexer of DeepSeek-V3.2 (arXiv 2512.02556, section 2): its key has a LayerNorm with bias."""
    count, size = fields.size("index_n_heads"), fields.size("index_head_dim")
    h, width = dim("h", hidden(fields)), dim("d_i", size)
    weights = (
        *linear("query", "wq_b", dim("a_i", count) * width, dim("r_q", fields.size("q_lora_rank"))),
        *linear("key", "wk", width, h),
        *Norm("key_norm", width, "layer", "native", bias=True).weights,
        *linear("head_weights", "weights_proj", dim("a_i", count), h),
    )
    return Indexer(count, size, fields.size("index_topk"), weights)


def deepseek(fields: Fields) -> ModelSpec:
    """DeepSeek-V2, V3 and R1: latent attention, the first layers dense, then experts with shared ones."""
    if fields.data.get("moe_layer_freq", 1) != 1:
        raise InputError.of(fields.name("moe_layer_freq"), fields.data["moe_layer_freq"], "only 1 is understood")
    plain = fields.data.get("use_mla") is False  # DeepSeek-VL2's small models and DeepSeek-OCR
    fields.ignore("use_mla", "lm_head", "rm_head")
    if plain:
        fields.ignore("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    mixer = {"full": lambda: attention(fields) if plain else latent_attention(fields)}
    spec = _latent_moe(fields, mixer, ["full"] * num_layers(fields))
    return multi_token_prediction.with_prediction(spec, multi_token_prediction.count(fields), copies=True)


def glm4_lite(fields: Fields) -> ModelSpec:
    """GLM-4.7 Flash: V3, whose class takes head_dim for the rotary part."""
    fields.size("qk_rope_head_dim", "head_dim")
    return deepseek(fields)


def deepseek_v2(fields: Fields) -> ModelSpec:
    """DeepSeek-V2, whose class alone reads `mlp_bias`."""
    has_bias = fields.flag("mlp_bias", default=False)
    if has_bias:
        raise InputError.of("mlp_bias", True, "only false is understood for DeepSeek-V2")
    return deepseek(fields)


def deepseek_v32(fields: Fields) -> ModelSpec:
    """DeepSeek-V3.2: V3 with an indexer in every layer."""
    mixer = {"sparse": lambda: latent_attention(fields, indexer=indexer(fields))}
    spec = _latent_moe(fields, mixer, ["sparse"] * num_layers(fields))
    return multi_token_prediction.with_prediction(spec, multi_token_prediction.count(fields), copies=True)


def glm_moe_dsa(fields: Fields) -> ModelSpec:
    """GLM-5: as V3.2, with layers that reuse the choice of the indexer before them."""
    count = num_layers(fields)
    types = fields.items("indexer_types", length=count)
    kinds = [str(kind) for kind in types] if types is not None else _indexer_schedule(fields, count)
    if not {*kinds} <= {"full", "shared"}:
        raise InputError.of("indexer_types", types, 'each must be "full" or "shared"')
    mixers = {
        "full": lambda: latent_attention(fields, indexer=indexer(fields)),
        "shared": lambda: latent_attention(fields),
    }
    return multi_token_prediction.with_prediction(
        _latent_moe(fields, mixers, kinds), multi_token_prediction.count(fields)
    )


def _indexer_schedule(fields: Fields, count: int) -> list[str]:
    pattern = fields.data.get("index_topk_pattern")
    fields.ignore("index_topk_pattern")
    if pattern is not None:
        letters = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}
        if not isinstance(pattern, str | list) or len(pattern) != count or not all(str(c) in letters for c in pattern):
            raise InputError.of("index_topk_pattern", pattern, f"it must have {count} letters, F or S")
        return [letters[str(letter)] for letter in pattern]
    every = max(1, fields.size("index_topk_freq", low=0) if fields.has("index_topk_freq") else 1)
    offset = fields.size("index_skip_topk_offset", low=0) if fields.has("index_skip_topk_offset") else 2
    return ["full" if max(at - offset + 1, 0) % every == 0 else "shared" for at in range(count)]


def _latent_moe(fields: Fields, mixers: Mapping[str, Callable[[], Mixer | None]], kinds: list[str]) -> ModelSpec:
    def routed() -> MoE:
        return moe(fields, shared=shared_expert(fields, _EXPERTS))

    forwards: dict[str, Callable[[], FeedForward]] = {"moe": routed, "dense": lambda: mlp(fields)}
    pattern = first_dense(default=0 if "first_k_dense_replace" in fields.data else 1)(fields)
    layers = combined(mixers, kinds, forwards, pattern, norms(fields))
    fields.ignore("num_key_value_heads", "num_nextn_predict_layers", "num_mtp_layers", "head_dim", "qk_head_dim")
    fields.ignore("intermediate_size", "moe_layer_freq", "layer_types", "indexer_rope_interleave", "mlp_bias")
    return assemble(fields, layers, dropout=dropouts(fields, **_DROPOUT))


def axk1(fields: Fields) -> ModelSpec:
    """A.X K1: V3 whose mixtures end in a norm."""
    spec = deepseek(fields)
    extra = Part("norms", Norm("post_mlp_norm", dim("h", hidden(fields))).weights)
    kinds = tuple(
        Layer(kind.kind, kind.mixer, kind.feed_forward, kind.norms, extra=(extra,))
        if isinstance(kind.feed_forward, MoE)
        else kind
        for kind in spec.layers.kinds
    )
    return replace(spec, layers=Stack(kinds, spec.layers.pattern))


def axk2(fields: Fields) -> ModelSpec:
    """A.X K2: DeepSeek-V3.2 with an output gate, and norms that a narrow MLP gates, but for the one before a dense MLP."""
    if not fields.size_or_none("q_lora_rank"):
        raise InputError.of("q_lora_rank", fields.data.get("q_lora_rank"), "the class needs a whole number above 0")
    mixers = {"sparse": lambda: latent_attention(fields, indexer=indexer(fields), gated=True)}
    spec = _latent_moe(fields, mixers, ["sparse"] * num_layers(fields))
    h, r = dim("h", hidden(fields)), dim("r_g", fields.size("gated_norm_rank"))

    def gates(kind: Layer) -> Part:
        gated = ("attention", "mlp") if isinstance(kind.feed_forward, MoE) else ("attention",)
        pairs = ((*linear(f"{at}_down", "fc1", r, h), *linear(f"{at}_up", "fc2", h, r)) for at in gated)
        return Part("norm_gates", tuple(weight for pair in pairs for weight in pair))

    kinds = tuple(replace(kind, extra=(gates(kind),)) for kind in spec.layers.kinds)
    left_out = ("output gates and the gates of norms are left out",)
    return replace(spec, layers=Stack(kinds, spec.layers.pattern), estimates=left_out)


def youtu(fields: Fields) -> ModelSpec:
    fields.ignore("num_key_value_heads", "head_dim", "qk_head_dim")
    layer = Layer("layer", latent_attention(fields), mlp(fields), norms(fields))
    return assemble(fields, uniform(fields, layer), tied=True, dropout=dropouts(fields, **_DROPOUT))


def minicpm3(fields: Fields) -> ModelSpec:
    """MiniCPM3: dense, with scaled embeddings, residuals and logits."""
    fields.ignore("num_key_value_heads", "head_dim", "qk_head_dim", "scale_emb", "scale_depth", "dim_model_base")
    feed_forward = mlp(fields, bias=fields.flag("mlp_bias", default=False))
    layer = Layer("layer", latent_attention(fields), feed_forward, norms(fields))
    return assemble(
        fields,
        uniform(fields, layer),
        tied=True,
        embedding_scale=True,
        head_scale=True,
        dropout=dropouts(fields, **_DROPOUT),
    )


def longcat(fields: Fields) -> ModelSpec:
    """LongCat-Flash (arXiv 2509.01322): a layer is two halves of attention and MLP; experts read what the first MLP reads, and are
    added after the second. Some of the chosen experts are zero experts, which pass their input on.

    The class also makes first projections for the zero experts, which no checkpoint fills and nothing runs: left out.
    """
    zeros = fields.size_or_none("zero_expert_num", low=0) or 0
    active = fields.size("moe_topk", "num_experts_per_tok")

    def experts() -> MoE:
        dense = mlp(fields, "ffn_hidden_size", "intermediate_size", letter="f")
        made = moe(fields, width=("expert_ffn_hidden_size", "moe_intermediate_size"), shared=dense)
        has_bias = fields.flag("router_bias", default=False) if fields.has("router_bias") else False
        return replace(made, router=router(hidden(fields), made.num_experts + zeros, has_bias))

    forwards: dict[str, Callable[[], FeedForward]] = {
        "moe": experts,
        "dense": lambda: mlp(fields, "ffn_hidden_size", "intermediate_size"),
    }
    count = fields.size("num_layers", high=MOST_LAYERS // 2)
    mixers = {"full": lambda: latent_attention(fields)}
    layers = combined(mixers, ["full"] * 2 * count, forwards, ["moe", "dense"] * count, norms(fields))
    fields.ignore("num_key_value_heads", "head_dim", "qk_head_dim", "num_hidden_layers", "zero_expert_type")
    if zeros:
        fields.assumptions.append(
            f"every token uses {active} experts that compute: the most; zero experts take some of the places"
        )
    return assemble(
        fields,
        layers,
        dropout=dropouts(fields, **_DROPOUT),
        estimates=("the experts' output waits for the second half of its layer",),
    )


FAMILIES = {
    "DeepseekV2ForCausalLM": Family(deepseek_v2, "deepseek_v2"),
    "DeepseekV3ForCausalLM": Family(deepseek, "deepseek_v3"),
    "DeepseekV32ForCausalLM": Family(deepseek_v32, "deepseek_v32"),
    "GlmMoeDsaForCausalLM": Family(glm_moe_dsa, "glm_moe_dsa"),
    "Glm4MoeLiteForCausalLM": Family(glm4_lite, "glm4_moe_lite"),
    "AXK1ForCausalLM": Family(axk1, "axk1"),
    "LongcatFlashForCausalLM": Family(longcat, "longcat_flash"),
    "AXK2ForCausalLM": Family(axk2, "axk2"),
    "YoutuForCausalLM": Family(youtu, "youtu"),
    "MiniCPM3ForCausalLM": Family(minicpm3, "minicpm3"),
}
