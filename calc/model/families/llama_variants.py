"""Dense decoders that are Llama with other norms, biases or windows; each differs by the traits in its row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from calc.errors import InputError
from calc.model.families import multi_token_prediction
from calc.model.families.base import Family
from calc.model.families.common import (
    LAYER_NORM,
    assemble,
    attention,
    bias,
    combined,
    dropouts,
    full_or_sliding,
    heads,
    hidden,
    mlp,
    moe,
    norms,
    num_layers,
    whole_heads,
)
from calc.model.feed_forward import MLP, FeedForward
from calc.model.fields import MOST_LAYERS, Fields
from calc.model.mixers import Attention
from calc.model.spec import ModelSpec
from calc.model.weights import Norm, Weight, dim

PRE = ("input_norm", "post_attention_norm")
POST = ("post_attention_norm", "post_feedforward_norm")
SANDWICH = ("input_norm", "post_attention_norm", "pre_feedforward_norm", "post_feedforward_norm")
FUSED_MLP = ("gate_up_proj", "gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Traits:
    """What sets a dense decoder apart. `bias`: letters that always have one; `bias_flag` and `flag_letters`: those that a flag
    gives one. `windows` (every, first) tells which layers see all tokens where layer_types does not; None: no layer has a window.
    `nope`: the layers that see all tokens do not rotate."""

    bias: str = ""
    bias_flag: str = "attention_bias"
    flag_letters: str = "qkvo"
    mlp_bias_flag: str = ""
    mlp: Mapping[str, Any] = field(default_factory=dict)
    norms: tuple[str, ...] = PRE
    norm: Mapping[str, Any] = field(default_factory=dict)
    qk_norm: str = ""
    qk: Mapping[str, Any] = field(default_factory=dict)
    windows: tuple[int, int] | None = None
    nope: bool = False
    attention: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    parallel: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)


def build(
    fields: Fields,
    traits: Traits,
    forwards: Mapping[str, Callable[[], FeedForward]],
    forward_pattern: Sequence[str],
) -> ModelSpec:
    """A decoder with these traits whose feed-forwards are given: one for each kind that `forward_pattern` names by layer."""
    letters = traits.bias + (bias(fields, traits.bias_flag, traits.flag_letters) if traits.bias_flag else "")
    kinds, size = full_or_sliding(fields, *traits.windows) if traits.windows else (["full"] * num_layers(fields), 0)

    def mixer(width: int) -> Attention:
        rotary = bool(width) or not traits.nope
        options = {"bias": letters, "window": width, "rotary": rotary, "norm_traits": traits.qk, **traits.attention}
        return attention(fields, traits.qk_norm, **options)

    layers = combined(
        {"full": lambda: mixer(0), "sliding": lambda: mixer(size)},
        kinds,
        forwards,
        forward_pattern,
        norms(fields, *traits.norms, **traits.norm),
        parallel=traits.parallel,
    )
    return assemble(
        fields,
        layers,
        tied=traits.tied,
        final_norm=Norm("weight", dim("h", hidden(fields)), **traits.norm),
        dropout=dropouts(fields, attention="attention_dropout"),
        **traits.model,
    )


def dense_mlp(fields: Fields, traits: Traits, *keys: str, width: int | None = None) -> MLP:
    """The MLP of a decoder with these traits."""
    options = dict(traits.mlp)
    if traits.mlp_bias_flag:
        options["bias"] = fields.flag(traits.mlp_bias_flag, default=False)
    return mlp(fields, *keys, width=width, **options)


def dense(traits: Traits) -> Callable[[Fields], ModelSpec]:
    """The reader of a dense decoder with these traits."""

    def read(fields: Fields) -> ModelSpec:
        return build(fields, traits, {"dense": lambda: dense_mlp(fields, traits)}, ["dense"] * num_layers(fields))

    return read


def cohere(fields: Fields) -> ModelSpec:
    """Command R and Aya: attention and MLP side by side on one LayerNorm without bias."""
    qk = fields.flag("use_qk_norm", default=False)
    return dense(
        Traits(
            norms=("input_norm",),
            norm=_COHERE_NORM,
            qk_norm="full" if qk else "",
            qk=_COHERE_NORM,
            tied=True,
            parallel=True,
            model={"head_scale": True},
        )
    )(fields)


def minicpm(fields: Fields) -> ModelSpec:
    """MiniCPM 1 and 2: Llama with scaled embeddings, residuals and logits; with `num_experts`, experts as in Mixtral."""
    traits = Traits(bias_flag="", tied=True, model={"embedding_scale": True, "head_scale": True})
    fields.ignore("scale_emb", "scale_depth", "dim_model_base")
    if not fields.has("num_experts"):
        return dense(traits)(fields)
    forwards = {"moe": lambda: moe(fields, width=("intermediate_size",))}
    return build(fields, traits, forwards, ["moe"] * num_layers(fields))


def mimo(fields: Fields) -> ModelSpec:
    """MiMo: Qwen2 whose class also builds the layers that predict further tokens."""
    if fields.has("use_sliding_window") and fields.flag("use_sliding_window", default=False):
        raise InputError.of("use_sliding_window", True, "only false is understood for MiMo")
    fields.ignore("attention_bias", "sliding_window", "max_window_layers", "use_mrope")
    spec = dense(Traits(bias="qkv", bias_flag=""))(fields)
    return multi_token_prediction.with_prediction(spec, multi_token_prediction.count(fields), in_total=True)


def stablelm(fields: Fields) -> ModelSpec:
    if fields.flag("qk_layernorm", default=False):
        raise InputError.of("qk_layernorm", True, "only false is understood for StableLM")
    parallel = fields.flag("use_parallel_residual", default=False)
    names = ("input_norm",) if parallel else PRE
    sizes = (*heads(fields)[:2], whole_heads(fields)[2])
    return dense(
        Traits(
            bias_flag="use_qkv_bias",
            flag_letters="qkv",
            norms=names,
            norm=LAYER_NORM,
            parallel=parallel,
            attention={"sizes": sizes},
        )
    )(fields)


def exaone4(fields: Fields) -> ModelSpec:
    """EXAONE 4: norms after each half; a window on three layers of four, and no rotation on the fourth."""
    every = fields.data.get("sliding_window_pattern", 4)
    if isinstance(every, str):  # "LLLG": the last letter is the layer that sees all tokens
        fields.ignore("sliding_window_pattern")
        every = len(every)
    else:
        every = fields.size("sliding_window_pattern", low=0, high=MOST_LAYERS) if every is not None else 0
    windowed = fields.has("sliding_window")
    return dense(Traits(bias_flag="", qk_norm="head", norms=POST, windows=(every, 1), nope=windowed))(fields)


def helium(fields: Fields) -> ModelSpec:
    """Helium, whose output projection is as wide as the hidden state."""
    count, _, head_dim = heads(fields)
    if count * head_dim != hidden(fields):
        rule = f"times num_attention_heads ({count}) it must be hidden_size ({hidden(fields)})"
        raise InputError.of("head_dim", head_dim, rule)
    return dense(Traits(flag_letters="qkv", mlp_bias_flag="mlp_bias", norm={"style": "wide"}))(fields)


def nanochat(fields: Fields) -> ModelSpec:
    """nanochat: no norm has a weight, and the first one stands on the embedding."""
    bare = {"weight": False}
    softcap = fields.number("final_logit_softcapping", default=0.0) > 0
    names = {"modules": ("", "fc1", "fc2")}
    traits = Traits(mlp=_PLAIN | names, norm=bare, qk_norm="head", qk=bare, model={"logit_softcap": softcap})
    return dense(traits)(fields)


def hyperclovax(fields: Fields) -> ModelSpec:
    names = SANDWICH if fields.flag("use_post_norm", default=False) else PRE
    return dense(Traits(mlp_bias_flag="mlp_bias", norms=names, model=_GRANITE))(fields)


def apertus1p5(fields: Fields) -> ModelSpec:
    rows = fields.size_or_none("output_vocab_size")
    if rows is not None and rows != fields.size("vocab_size"):
        raise InputError.of("output_vocab_size", rows, "it must equal vocab_size or be null")
    return dense(Traits(mlp=_XIELU, qk_norm="head"))(fields)


def seed_oss(fields: Fields) -> ModelSpec:
    output = bias(fields, "attention_out_bias", "o")
    return dense(Traits(bias=output, flag_letters="qkv", mlp_bias_flag="mlp_bias"))(fields)


def internlm3(fields: Fields) -> ModelSpec:
    for key in ("bias", "qkv_bias"):
        if fields.has(key) and fields.flag(key, default=False):
            raise InputError.of(key, True, "only false is understood for InternLM 3")
    return dense(Traits(bias_flag=""))(fields)


def smollm3(fields: Fields) -> ModelSpec:
    """SmolLM3: every fourth layer does not rotate, which changes no count."""
    fields.ignore("no_rope_layers", "no_rope_layer_interval")
    windows = (0, 1) if fields.flag("use_sliding_window", default=False) else None
    if not windows:
        fields.ignore("layer_types", "sliding_window", "max_window_layers")
    return dense(Traits(mlp_bias_flag="mlp_bias", tied=True, windows=windows))(fields)


_COHERE_NORM = {"kind": "layer", "style": "centered"}
_NO_WEIGHT = {"kind": "layer", "style": "native", "weight": False}
_GRANITE = {"embedding_scale": True, "head_scale": True}
_PLAIN = {"gated": False}
_XIELU = _PLAIN | {"extra": (Weight("activation", (dim("2", 2),)),)}  # its two slopes are learned

INTERNLM = "https://huggingface.co/internlm/internlm-7b/blob/main/modeling_internlm.py"
INTERNLM2 = "https://huggingface.co/internlm/internlm2-7b/blob/main/modeling_internlm2.py"
INTERNLM3 = "https://huggingface.co/internlm/internlm3-8b-instruct/blob/main/modeling_internlm3.py"
ORION = "https://huggingface.co/OrionStarAI/Orion-14B-Base/blob/main/modeling_orion.py"
MIMO = "https://huggingface.co/XiaomiMiMo/MiMo-7B-Base/blob/main/modeling_mimo.py"
MINICPM = "https://huggingface.co/openbmb/MiniCPM-2B-sft-bf16/blob/main/modeling_minicpm.py"

FAMILIES = {
    "ArceeForCausalLM": Family(dense(Traits(mlp_bias_flag="mlp_bias", mlp=_PLAIN)), "arcee"),
    "ApertusForCausalLM": Family(dense(Traits(mlp=_XIELU, qk_norm="head")), "apertus"),
    "Apertus1p5TextForCausalLM": Family(apertus1p5, "apertus1p5"),
    "CohereForCausalLM": Family(cohere, "cohere"),
    "Cohere2ForCausalLM": Family(
        dense(
            Traits(
                norms=("input_norm",),
                norm=_COHERE_NORM,
                tied=True,
                parallel=True,
                windows=(4, 1),
                nope=True,
                model={"head_scale": True},
            )
        ),
        "cohere2",
    ),
    "CwmForCausalLM": Family(dense(Traits(bias_flag="", mlp_bias_flag="mlp_bias", windows=(4, 0))), "cwm"),
    "Emu3ForCausalLM": Family(dense(Traits(mlp_bias_flag="mlp_bias")), "emu3"),
    "Ernie4_5ForCausalLM": Family(dense(Traits(bias_flag="use_bias", mlp_bias_flag="use_bias", tied=True)), "ernie4_5"),
    "EuroBertForMaskedLM": Family(dense(Traits(mlp_bias_flag="mlp_bias", attention={"causal": False})), "eurobert"),
    "Exaone4ForCausalLM": Family(exaone4, "exaone4"),
    "GlmForCausalLM": Family(dense(Traits(flag_letters="qkv", mlp={"modules": FUSED_MLP})), "glm"),
    "Glm4ForCausalLM": Family(dense(Traits(flag_letters="qkv", mlp={"modules": FUSED_MLP}, norms=SANDWICH)), "glm4"),
    "GraniteForCausalLM": Family(dense(Traits(mlp_bias_flag="mlp_bias", model=_GRANITE)), "granite"),
    "GraniteSWAForCausalLM": Family(
        dense(Traits(mlp_bias_flag="mlp_bias", attention={"sinks": True}, windows=(4, 0), tied=True, model=_GRANITE)),
        "granite_swa",
    ),
    "HeliumForCausalLM": Family(helium, "helium"),
    "HyperCLOVAXForCausalLM": Family(hyperclovax, "hyperclovax"),
    "InternLMForCausalLM": Family(dense(Traits(bias_flag="bias")), INTERNLM),
    "InternLM2ForCausalLM": Family(
        dense(
            Traits(
                bias_flag="bias",
                attention={"modules": ("wqkv", "wqkv", "wqkv", "wo")},
                mlp={"modules": ("w1", "w3", "w2")},
            )
        ),
        INTERNLM2,
    ),
    "InternLM3ForCausalLM": Family(internlm3, INTERNLM3),
    "MiMoForCausalLM": Family(mimo, MIMO),
    "MiniCPMForCausalLM": Family(minicpm, MINICPM),
    "Ministral3ForCausalLM": Family(dense(Traits(bias_flag="", windows=(0, 1))), "ministral3"),
    "NanoChatForCausalLM": Family(nanochat, "nanochat"),
    "OlmoForCausalLM": Family(dense(Traits(norm=_NO_WEIGHT)), "olmo"),
    "Olmo3ForCausalLM": Family(
        dense(Traits(qk_norm="full", qk={"style": "wide"}, norms=POST, norm={"style": "wide"}, windows=(4, 1))), "olmo3"
    ),
    "OrionForCausalLM": Family(dense(Traits(bias_flag="", norm=LAYER_NORM)), ORION),
    "SeedOssForCausalLM": Family(seed_oss, "seed_oss"),
    "SmolLM3ForCausalLM": Family(smollm3, "smollm3"),
    "StableLmForCausalLM": Family(stablelm, "stablelm"),
    "VaultGemmaForCausalLM": Family(
        dense(
            Traits(
                norms=("input_norm", "pre_feedforward_norm"),
                norm={"style": "gemma"},
                tied=True,
                windows=(2, 1),
                model={"embedding_scale": True},
            )
        ),
        "vaultgemma",
    ),
}
