"""In which number format each matmul of a layer runs: the checkpoint's format where it quantises that part, 16 bits elsewhere."""

from __future__ import annotations

from calc.model.mixers import LatentAttention
from calc.model.spec import Layer
from calc.model.weights import Part, Weight

# format of the checkpoint -> format of its matmuls, as `calc.kernel_times` names them; GGUF runs on 16-bit activations
_GEMM = {
    "bf16": "bf16",
    "fp16": "bf16",
    "fp32": "fp32",
    "fp8": "fp8",
    "int8": "int8",
    "gptq-int4": "int4",
    "awq-int4": "int4",
    "nf4": "int4",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
}


def gemm_format(weights: str, kind: Layer, part: Part, weight: Weight, *, blocks: bool) -> str:
    """The format in which `times.gemm` runs this weight. `blocks`: fp8 has one scale for each 128 x 128 (DeepSeek-V3's way).

    Routers, heads and gates of one feature stay in 16 bits. NVFP4 and 4-bit integers of a model with experts are for its
    feed-forward: NVIDIA's checkpoints of DeepSeek-V3.1, Kimi-K2, GLM-5, MiniMax-M2.5 and Qwen3.5 leave attention in 16 bits
    (hf_quant_config.json, exclude_modules), DeepSeek's and Moonshot's output projection excepted.
    """
    wide = "bf16"
    if not weight.matmul or part.name in ("router", "head") or weight.shape[0].size == 1:
        return wide
    found = _GEMM.get(weights, "int4" if weights.startswith("gguf") else wide)
    if found == "fp8" and blocks:
        return "fp8_block"
    experts = any(each.expert for each in kind.parts)
    if found == "mxfp4":
        return found if part.expert or not experts else wide
    if found in ("nvfp4", "int4") and experts and not part.expert:
        latent_output = isinstance(kind.mixer, LatentAttention) and weight.name == "output" and found == "nvfp4"
        return found if latent_output or (part.name == "shared_expert" and found == "nvfp4") else wide
    return found
