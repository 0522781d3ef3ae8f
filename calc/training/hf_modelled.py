"""The model classes whose transformers program the ledger follows, and what is known of the others."""

from __future__ import annotations

from calc.model.mixers import Attention, LatentAttention, Recurrence
from calc.model.spec import ModelSpec

# Held against the traced program: saved activations within 1 %, the peak within 2 % (tests/measure/test_training_families.py,
# tests/measure/test_training_grid.py).
FOLLOWED = frozenset(
    [
        *(
            "BloomForCausalLM",
            "CohereForCausalLM",
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "FalconForCausalLM",
        ),
        *("GPT2LMHeadModel", "GPTJForCausalLM", "GPTNeoXForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
        *("Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration", "GemmaForCausalLM", "Glm4MoeForCausalLM"),
        *("Glm4MoeLiteForCausalLM", "GptOssForCausalLM", "LlamaForCausalLM", "LlavaForConditionalGeneration"),
        *(
            "MiMoV2FlashForCausalLM",
            "MiniMaxM2ForCausalLM",
            "MistralForCausalLM",
            "MixtralForCausalLM",
            "OPTForCausalLM",
        ),
        *("Olmo2ForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM"),
        *("Qwen3MoeForCausalLM", "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        *("Qwen2_5_VLForConditionalGeneration", "StableLmForCausalLM", "Starcoder2ForCausalLM"),
        *("ArceeForCausalLM", "Cohere2ForCausalLM", "CwmForCausalLM", "Ernie4_5ForCausalLM"),
        *("Exaone4ForCausalLM", "Glm4ForCausalLM", "GlmForCausalLM", "GraniteForCausalLM", "HeliumForCausalLM"),
        *(
            "HyperCLOVAXForCausalLM",
            "Ministral3ForCausalLM",
            "PhiForCausalLM",
            "SmolLM3ForCausalLM",
        ),
    ]
)
# Activations that the trace of a model keeps beyond those told, as a share of the traced (pure bf16, nothing computed again).
_LOW = {
    "DeepseekV4ForCausalLM": "76 % low (deepseek-v4-pro, 1,024 tokens)",
    "GraniteMoeHybridForCausalLM": "73 % low (granite-4.0-h-small, 256 tokens)",
    "MambaForCausalLM": "94 % low (mamba-370m-hf, 256 tokens)",
    "NemotronHForCausalLM": "83 % low (nvidia-nemotron-nano-9b-v2, 256 tokens)",
    "Qwen3NextForCausalLM": "50 % low (qwen3-next-80b-a3b-thinking, 256 tokens)",
    "Qwen3_5ForConditionalGeneration": "52 % low (qwen3.5-27b, 256 tokens)",
    "Qwen3_5MoeForConditionalGeneration": "52 % low (qwen3.6-35b-a3b, 256 tokens)",
    "T5ForConditionalGeneration": "67 % low (t5-v1_1-xxl, 1,024 tokens)",
    "DeepseekV32ForCausalLM": "0.3 % low, 3 % with recomputation (deepseek-v3.2, 1,024 tokens)",
    "GlmMoeDsaForCausalLM": "0.3 % low, 16 % with recomputation (glm-5, 1,024 tokens)",
}


def remarks(spec: ModelSpec) -> list[str]:
    """What an answer must say of a model whose program is not followed; nothing where it is."""
    mixers = [kind.mixer for kind in spec.layers.kinds]
    kinds = dict.fromkeys(mixer.kind for mixer in mixers if isinstance(mixer, Recurrence))
    told = [
        f"{kind} layers are counted as their input and what fused kernels are known to keep (mamba-ssm, "
        "flash-linear-attention): transformers' own PyTorch code, which the trace runs, keeps several times as much"
        for kind in kinds
    ]
    alibi = spec.architecture == "FalconForCausalLM" and not all(isinstance(m, Attention) and m.rotary for m in mixers)
    if spec.architecture in FOLLOWED and not alibi:
        return told
    low = _LOW.get(spec.architecture)
    against = f"against the trace they are {low}" if low else "they have not been held against the trace"
    indexed = any(isinstance(mixer, Attention | LatentAttention) and mixer.indexer for mixer in mixers)
    instead = "without the indexer's own tensors" if indexed else "of a generic block"
    told.append(
        f"{spec.architecture}: its program in transformers is not followed operator by operator; activations are those "
        f"{instead}, states are exact; {against}"
    )
    return told
