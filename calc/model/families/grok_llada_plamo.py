"""Decoders whose classes come with their checkpoints: Grok, LLaDA and Dream (which write by diffusion), PLaMo, Phi-3 small."""

from __future__ import annotations

from dataclasses import replace

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.common import (
    LAYER_NORM,
    assemble,
    attention,
    bias,
    full_or_sliding,
    heads,
    hidden,
    mlp,
    moe,
    norms,
    num_layers,
    patterned,
    uniform,
)
from calc.model.families.llama_qwen_gemma_phi import qwen3
from calc.model.families.llama_variants import FUSED_MLP, SANDWICH, Traits, build, dense
from calc.model.families.recurrent_mixers import conv_state
from calc.model.feed_forward import FeedForward
from calc.model.fields import MOST_LAYERS, Fields
from calc.model.mixers import Attention, Recurrence
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Dim, Norm, Part, Split, State, Weight, dim, linear

_GROK = Traits(
    bias_flag="", norms=SANDWICH, attention={"softcap": True}, model={"embedding_scale": True, "head_scale": True}
)
_DIFFUSION = "it writes by diffusion: every token attends to all, and no cache of keys and values grows token by token"
_QKV = ("qkv_proj", "qkv_proj", "qkv_proj", "o_proj")
_PLAMO_NORMS = ("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm")


def grok(fields: Fields) -> ModelSpec:
    """Grok 1 and 2: experts between norms before and after; with `residual_moe`, each layer has a dense MLP as well."""
    both = fields.has("residual_moe") and fields.flag("residual_moe", default=False)
    width = ("moe_intermediate_size",) if fields.has("moe_intermediate_size") else ("intermediate_size",)
    extra = (Part("residual_mlp", mlp(fields).weights),) if both else ()

    def routed() -> FeedForward:
        return replace(moe(fields, width=width), extra=extra)

    names = ("embedding_multiplier_scale", "output_multiplier_scale", "attn_output_multiplier", "max_attn_value")
    fields.ignore(*names, "attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping")
    fields.ignore("attn_temperature_len", "sliding_window_size", "global_attn_freq", "logit_softcapping", "mup")
    fields.ignore(
        "original_max_position_embeddings", "scaling_factor", "extrapolation_factor", "beta_fast", "beta_slow"
    )
    fields.ignore("intermediate_size", "attn_factor", "final_logit_softcap")
    return build(fields, _GROK, {"moe": routed}, ["moe"] * num_layers(fields))


def _bidirectional(spec: ModelSpec) -> ModelSpec:
    return replace(spec, notes=(*spec.notes, _DIFFUSION))


def llada(fields: Fields) -> ModelSpec:
    """LLaDA (arXiv 2502.09992): Llama's layers under OLMo's names, where every token sees all."""
    for key, wanted in (
        ("block_type", "llama"),
        ("layer_norm_type", "rms"),
        ("alibi", False),
        ("bias_for_layer_norm", False),
    ):
        if fields.has(key) and fields.data[key] != wanted:
            raise InputError.of(key, fields.data[key], f"only {wanted} is understood for LLaDA")
    rows = fields.size("embedding_size", "vocab_size") if fields.has("embedding_size") else fields.size("vocab_size")
    names = {"num_key_value_heads": "n_kv_heads", "intermediate_size": "mlp_hidden_size"}
    given = {new: fields.data[old] for new, old in names.items() if fields.has(old)}
    tied = fields.flag("weight_tying", default=False)
    fields.data = {**fields.data, **given, "vocab_size": rows, "embedding_size": rows, "tie_word_embeddings": tied}
    everywhere = fields.flag("include_bias", default=False)
    if everywhere:
        raise InputError.of("include_bias", True, "only false is understood for LLaDA")
    letters = bias(fields, "include_qkv_bias", "qkv")
    fields.ignore(*names.values(), "block_type", "layer_norm_type", "alibi", "alibi_bias_max", "bias_for_layer_norm")
    fields.ignore(
        "activation_type", "attention_layer_norm", "attention_layer_norm_with_affine", "block_group_size", "rope"
    )
    fields.ignore(
        "embedding_dropout", "residual_dropout", "flash_attention", "init_cutoff_factor", "init_device", "init_fn"
    )
    fields.ignore(
        "input_emb_norm",
        "layer_norm_with_affine",
        "mlp_ratio",
        "multi_query_attention",
        "precision",
        "rope_full_precision",
    )
    fields.ignore("scale_logits", "max_sequence_length", "embedding_size")
    modules = ("q_proj", "k_proj", "v_proj", "attn_out")
    traits = Traits(
        bias=letters,
        bias_flag="",
        attention={"causal": False, "modules": modules},
        mlp={"modules": ("ff_proj", "up_proj", "ff_out"), "activation": "silu"},
    )
    return _bidirectional(dense(traits)(fields))


def dream(fields: Fields) -> ModelSpec:
    """Dream (arXiv 2508.15487): Qwen 2.5's tensors, where every token sees all."""
    fields.ignore("use_sliding_window", "sliding_window", "max_window_layers", "full_attn_mask", "attention_mask_type")
    return _bidirectional(dense(Traits(bias="qkv", bias_flag="", attention={"causal": False}))(fields))


def sdar(fields: Fields) -> ModelSpec:
    """SDAR: Qwen3's tensors, writing a block of tokens at a time."""
    fields.ignore("block_size", "fuse_cross_entropy", "debug")
    note = "it writes a block of tokens at a time by diffusion; its steps a block are not modelled"
    spec = qwen3(fields)
    return replace(spec, notes=(*spec.notes, note))


def plamo(fields: Fields) -> ModelSpec:
    """PLaMo 1: attention and MLP side by side on one norm; `n_shared_head` queries share a key and a value."""
    count = fields.size("num_attention_heads")
    shared = fields.size("n_shared_head", default=8) if fields.has("n_shared_head") else 8
    kv = max(1, count // shared)
    fields.divides("num_key_value_heads", kv, "num_attention_heads", count)
    fields.ignore("num_key_value_heads", "tokenizer_class")
    sizes = (count, kv, hidden(fields) // count)
    return dense(Traits(bias_flag="", norms=("input_norm",), parallel=True, attention={"sizes": sizes}))(fields)


def plamo2(fields: Fields) -> ModelSpec:
    """PLaMo 2: Mamba's state with one step a head, and every `mamba_step`-th layer attention with norms over all queries and keys."""
    h, count = dim("h", hidden(fields)), num_layers(fields)
    size = fields.size("hidden_size_per_head")
    query, kv, _ = heads(_with(fields, head_dim=size))
    window = fields.size_or_none("attention_window_size", "sliding_window") or 0
    step = fields.size("mamba_step", default=2, low=2, high=MOST_LAYERS)
    full = fields.items("full_attention_idx") or []
    number = fields.size("mamba_num_heads", default=64)
    state, taps = fields.size("mamba_d_state", default=64), fields.size("mamba_d_conv", default=4)

    def soft(width: int) -> Layer:
        mixer = attention(fields, "full", sizes=(query, kv, size), window=width, modules=_QKV)
        return Layer("full" if not width else "sliding", mixer, feed_forward(), norms(fields, *_PLAMO_NORMS))

    def recurrent() -> Layer:
        mixer = _plamo_mamba(h, dim("n", number), dim("p", size), dim("N", state), dim("K", taps))
        return Layer("mamba", mixer, feed_forward(), norms(fields, *_PLAMO_NORMS))

    def feed_forward() -> FeedForward:
        return mlp(fields, modules=FUSED_MLP, activation="silu")

    enabled = fields.flag("mamba_enabled", default=True)
    last = count <= step // 2  # so few layers: the last one is attention
    attends = [not enabled or (at == count - 1 if last else at % step == step // 2) for at in range(count)]
    kinds = [
        "mamba" if not soft_ else "full" if not window or at in full else "sliding" for at, soft_ in enumerate(attends)
    ]
    fields.ignore(
        "mamba_chunk_size", "linear_type", "fp8_accum_dtype", "use_cache", "eval_attention_n_bit", "eval_mlp_n_bit"
    )
    fields.ignore("use_predefined_initial_state", "attention_dropout", "mamba_dt_rank", "head_dim")
    layers = patterned({"mamba": recurrent, "full": lambda: soft(0), "sliding": lambda: soft(window)}, kinds)
    return assemble(fields, layers, tied=True)


def _with(fields: Fields, **values: int) -> Fields:
    """The fields with some of them said under another name."""
    fields.data = {**fields.data, **values}
    return fields


def _plamo_mamba(h: Dim, number: Dim, size: Dim, state: Dim, taps: Dim) -> Recurrence:
    """Mamba 2's recurrence with Mamba 1's small projections, normalised. 5 FLOPs an element of the state."""
    inner, rank = number * size, dim("r", max(64, h.size // 16))
    memory = inner * state
    weights = (
        *linear("input", "in_proj", dim("2", 2) * inner, h, Split.OUTPUT),
        Weight("convolution", (inner, taps)),
        *linear("state_projections", "bcdt_proj", rank + dim("2", 2) * state, inner, Split.INPUT),
        *linear("step", "dt_proj", number, rank, Split.OUTPUT),
        *(Weight(name, (number,)) for name in ("step_bias", "decay_rate", "skip")),
        *(
            weight
            for name, of in (("step_norm", rank), ("input_norm", state), ("output_norm", state))
            for weight in Norm(name, of).weights
        ),
        *linear("output", "out_proj", h, inner, Split.INPUT),
    )
    states = (conv_state(inner, taps), State("ssm_state", memory, "fp32", Split.OUTPUT))
    flops = dim("5", 5) * memory + dim("2", 2) * taps * inner + dim("2", 2) * inner
    return Recurrence("mamba", weights, states, flops, dim("4", 4) * inner + number + dim("2", 2) * state)


def plamo3(fields: Fields) -> ModelSpec:
    """PLaMo 3: Gemma 2's four norms, norms over each head, and a window on seven layers of eight."""
    window = fields.size_or_none("window_size", "sliding_window") or 0
    every = fields.size("sliding_window_pattern", default=8)
    fields.data = {**fields.data, "sliding_window": window or None}
    if fields.has("interleaved_sliding_window"):
        fields.ignore("interleaved_sliding_window")
    fields.ignore(
        "window_size", "linear_type", "image_feature_size", "image_proj_type", "rope_local_theta", "image_token_id"
    )
    kinds, size = full_or_sliding(fields, every, 1)

    def layer(kind: str, width: int) -> Layer:
        mixer = attention(fields, "head", "gemma", window=width, modules=_QKV)
        return Layer(
            kind, mixer, mlp(fields, modules=FUSED_MLP, activation="silu"), norms(fields, *_PLAMO_NORMS, style="gemma")
        )

    layers = patterned({"full": lambda: layer("full", 0), "sliding": lambda: layer("sliding", size)}, kinds)
    return assemble(fields, layers, tied=True, final_norm=Norm("weight", dim("h", hidden(fields)), style="gemma"))


def phi3_small(fields: Fields) -> ModelSpec:
    """Phi-3 small: LayerNorms, biases everywhere, a gated GELU, and the head tied to the embedding."""
    names = ("query_key_value", "query_key_value", "query_key_value", "dense")
    mixer: Attention = attention(fields, bias="qkvo", modules=names)
    forward = mlp(
        fields, "ff_intermediate_size", bias=True, activation="gegelu", modules=("up_proj", "up_proj", "down_proj")
    )
    for key in list(fields.data):
        if key.startswith(("mup_", "blocksparse_", "ff_", "gegelu_", "rope_", "attention_", "embedding_")):
            fields.ignore(key)
    fields.ignore(
        "dense_attention_every_n_layers", "dummy_token_indices", "hidden_act", "ffn_dropout_prob", "attention_bias"
    )
    layer = Layer("layer", mixer, forward, norms(fields, **LAYER_NORM))
    final = Norm("weight", dim("h", hidden(fields)), **LAYER_NORM)
    note = "three layers of four attend to blocks of tokens; they are counted as attending to all"
    spec = assemble(fields, uniform(fields, layer), tied=True, final_norm=final)
    return replace(spec, notes=(*spec.notes, note))


_HUB = "https://huggingface.co/"
FAMILIES = {
    "Grok1ModelForCausalLM": Family(grok, f"{_HUB}hpcai-tech/grok-1/blob/main/modeling_grok1.py"),
    "Grok1ForCausalLM": Family(
        grok, "https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/models/grok.py"
    ),
    "LLaDAModelLM": Family(llada, f"{_HUB}GSAI-ML/LLaDA-8B-Base/blob/main/modeling_llada.py"),
    "DreamModel": Family(dream, f"{_HUB}Dream-org/Dream-v0-Base-7B/blob/main/modeling_dream.py"),
    "SDARForCausalLM": Family(sdar, f"{_HUB}JetLM/SDAR-1.7B-Chat/blob/main/modeling_sdar.py"),
    "PlamoForCausalLM": Family(plamo, f"{_HUB}pfnet/plamo-13b/blob/main/modeling_plamo.py"),
    "Plamo2ForCausalLM": Family(plamo2, f"{_HUB}pfnet/plamo-2-1b/blob/main/modeling_plamo.py"),
    "Plamo3ForCausalLM": Family(plamo3, f"{_HUB}pfnet/plamo-3-nict-2b-base/blob/main/modeling_plamo.py"),
    "Phi3SmallForCausalLM": Family(
        phi3_small, f"{_HUB}microsoft/Phi-3-small-8k-instruct/blob/main/modeling_phi3_small.py"
    ),
}
