"""The model classes of transformers: one row a class, with every fact that hangs on its name.

A class that is not here runs the usual program: `ModelClass()`. What the names in a row stand for is written in the programs
(`calc.training.transformers`, `calc.training.torchtitan.blocks`), which know no class by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

Modeling = Literal["usual", "bloom", "falcon", "gemma4", "gptj", "opt"]
Router = Literal["usual", "mixtral", "clamped", "fp32", "fp32_corrected"]
RotaryTables = Literal["usual", "fp32", "complex", "half", "none"]


@dataclass(frozen=True, slots=True)
class LigerPatches:
    """What Liger-Kernel puts in the place of a class's own program, besides norms, loss and gated feed-forward.

    `in_place`: the gradient of a norm's input is written over that of its output. `rotary`: its rotary positions. `experts`: its
    fused experts. `logits`: of the fused loss, a chunk's take so many times the memory of the head's input.
    """

    in_place: bool = True
    rotary: bool = True
    experts: bool = True
    logits: int = 1


@dataclass(frozen=True, slots=True)
class ModelClass:
    """What the program of one class does in its own way; the defaults are the usual program of transformers 5.24."""

    followed: bool = False  # compared with the traced program: saved activations within 1 %, the peak within 2 %
    shortfall: str = ""  # where it is not followed: what the trace keeps beyond the prediction, and of which model
    modeling: Modeling = "usual"  # whose attention, feed-forward or buffers of its own it has (modeling_<name>.py)
    router: Router = "usual"  # of its experts
    eager_only: bool = False  # it has neither SDPA nor flash attention
    own_position_ids: bool = False  # none of the usual position ids
    batched_positions: bool = False  # it looks learned positions up for each sequence
    transposed_weights: bool = False  # its layers multiply by weight.T
    scaled_queries: bool = False  # it scales the queries before the kernel
    fp32_rotary: bool = False  # it turns queries and keys in fp32
    rotary_tables: RotaryTables = "usual"
    rotary_bases: int = 1  # tables of sines and cosines: windowed layers may turn with a base of their own
    shifted_scores: bool = False  # it shifts eager scores in every layer, and calls them by the name of the raw ones
    scaled_layers: bool = False  # a layer ends with a factor, applied in place
    published_stacked: bool = False  # its experts were never linear layers, so that peft leaves them alone
    liger: LigerPatches | None = None  # liger_kernel/transformers/monkey_patch.py of Liger-Kernel 0.8.5
    torchtitan: Literal["", "complex", "cosines"] = ""  # how torchtitan's program of it turns heads; "": it has none
    torchtitan_normalised: bool = False  # torchtitan: the weights of a token's experts sum to one

    @property
    def fp32_router(self) -> bool:
        """Whether the class keeps its routers in fp32 (_keep_in_fp32_modules_strict) and computes them so."""
        return self.router in ("fp32", "fp32_corrected")

    @property
    def corrected_router(self) -> bool:
        """Whether a bias in an fp32 buffer, no parameter, balances the experts (DeepSeek-V3)."""
        return self.router == "fp32_corrected"


USUAL: Final = ModelClass()
_FOLLOWED: Final = ModelClass(followed=True)
_LIGER: Final = ModelClass(followed=True, liger=LigerPatches())
_FP32_ROUTER: Final = ModelClass(router="fp32_corrected")
_GEMMA_4: Final = ModelClass(modeling="gemma4", scaled_layers=True)


def _low(shortfall: str, router: Router = "usual") -> ModelClass:
    return ModelClass(shortfall=shortfall, router=router)


MODEL_CLASSES: Final[Mapping[str, ModelClass]] = {
    "ArceeForCausalLM": _FOLLOWED,
    "BloomForCausalLM": ModelClass(followed=True, modeling="bloom", eager_only=True, own_position_ids=True),
    "Cohere2ForCausalLM": ModelClass(followed=True, fp32_rotary=True),
    "CohereForCausalLM": ModelClass(followed=True, fp32_rotary=True),
    "CwmForCausalLM": _FOLLOWED,
    "DeepseekV2ForCausalLM": ModelClass(
        followed=True, router="fp32", rotary_tables="complex", liger=LigerPatches(rotary=False), torchtitan="complex"
    ),
    "DeepseekV32ForCausalLM": _low("0.3 % low, 3 % with recomputation (deepseek-v3.2, 1,024 tokens)", "fp32_corrected"),
    "DeepseekV3ForCausalLM": ModelClass(
        followed=True,
        router="fp32_corrected",
        liger=LigerPatches(rotary=False),
        torchtitan="complex",
        torchtitan_normalised=True,
    ),
    "DeepseekV4ForCausalLM": _low("76 % low (deepseek-v4-pro, 1,024 tokens)"),
    "Dots1ForCausalLM": _FP32_ROUTER,
    "Ernie4_5ForCausalLM": _FOLLOWED,
    "Ernie4_5_MoeForCausalLM": _FP32_ROUTER,
    "Exaone4ForCausalLM": _FOLLOWED,
    "ExaoneMoeForCausalLM": _FP32_ROUTER,
    "FalconForCausalLM": ModelClass(followed=True, modeling="falcon", transposed_weights=True),
    "GPT2LMHeadModel": _FOLLOWED,
    "GPTJForCausalLM": ModelClass(followed=True, modeling="gptj", rotary_tables="none"),
    "GPTNeoXForCausalLM": _FOLLOWED,
    "Gemma2ForCausalLM": ModelClass(followed=True, liger=LigerPatches(in_place=False)),
    "Gemma3ForCausalLM": ModelClass(followed=True, rotary_bases=2, liger=LigerPatches(in_place=False)),
    "Gemma3ForConditionalGeneration": ModelClass(followed=True, rotary_bases=2),
    "Gemma4ForCausalLM": _GEMMA_4,
    "Gemma4ForConditionalGeneration": replace(_GEMMA_4, followed=True),
    "Gemma4UnifiedForCausalLM": _GEMMA_4,
    "GemmaForCausalLM": _LIGER,
    "Glm4ForCausalLM": _FOLLOWED,
    "Glm4MoeForCausalLM": replace(_FP32_ROUTER, followed=True),
    "Glm4MoeLiteForCausalLM": replace(_FP32_ROUTER, followed=True),
    "GlmForCausalLM": _FOLLOWED,
    "GlmMoeDsaForCausalLM": _low("0.3 % low, 16 % with recomputation (glm-5, 1,024 tokens)", "fp32_corrected"),
    "GptOssForCausalLM": ModelClass(
        followed=True,
        router="clamped",
        rotary_tables="half",
        published_stacked=True,
        liger=LigerPatches(experts=False, logits=8),
    ),
    "GraniteForCausalLM": _FOLLOWED,
    "GraniteMoeHybridForCausalLM": _low("73 % low (granite-4.0-h-small, 256 tokens)"),
    "HeliumForCausalLM": _FOLLOWED,
    "HyperCLOVAXForCausalLM": _FOLLOWED,
    "KimiLinearForCausalLM": _FP32_ROUTER,
    "LlamaForCausalLM": replace(_LIGER, torchtitan="complex"),
    "LlavaForConditionalGeneration": _FOLLOWED,
    "MambaForCausalLM": _low("94 % low (mamba-370m-hf, 256 tokens)"),
    "MiMoV2FlashForCausalLM": replace(_FP32_ROUTER, followed=True, rotary_bases=2, shifted_scores=True),
    "MiniMaxM2ForCausalLM": _FOLLOWED,
    "Ministral3ForCausalLM": _FOLLOWED,
    "MistralForCausalLM": _LIGER,
    "MixtralForCausalLM": replace(_LIGER, router="mixtral"),
    "NemotronHForCausalLM": _low("83 % low (nvidia-nemotron-nano-9b-v2, 256 tokens)", "fp32_corrected"),
    "OPTForCausalLM": ModelClass(
        followed=True, modeling="opt", own_position_ids=True, batched_positions=True, scaled_queries=True
    ),
    "Olmo2ForCausalLM": ModelClass(followed=True, rotary_tables="fp32", liger=LigerPatches(in_place=False)),
    "Olmo3ForCausalLM": ModelClass(rotary_tables="fp32"),
    "Phi3ForCausalLM": _LIGER,
    "PhiForCausalLM": _FOLLOWED,
    "Qwen2ForCausalLM": _LIGER,
    "Qwen2MoeForCausalLM": _FOLLOWED,
    "Qwen2_5_VLForConditionalGeneration": _FOLLOWED,
    "Qwen3ForCausalLM": replace(_LIGER, torchtitan="cosines"),
    "Qwen3MoeForCausalLM": replace(_LIGER, torchtitan="cosines", torchtitan_normalised=True),
    "Qwen3NextForCausalLM": _low("50 % low (qwen3-next-80b-a3b-thinking, 256 tokens)"),
    "Qwen3VLForConditionalGeneration": _FOLLOWED,
    "Qwen3VLMoeForConditionalGeneration": _FOLLOWED,
    "Qwen3_5ForConditionalGeneration": _low("52 % low (qwen3.5-27b, 256 tokens)"),
    "Qwen3_5MoeForConditionalGeneration": _low("52 % low (qwen3.6-35b-a3b, 256 tokens)"),
    "SmolLM3ForCausalLM": _FOLLOWED,
    "StableLmForCausalLM": _FOLLOWED,
    "Starcoder2ForCausalLM": _FOLLOWED,
    "T5ForConditionalGeneration": _low("67 % low (t5-v1_1-xxl, 1,024 tokens)"),
}


def model_class(architecture: str) -> ModelClass:
    """The row of a class; the usual program where it has none."""
    return MODEL_CLASSES.get(architecture, USUAL)
