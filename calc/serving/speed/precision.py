"""In which number format each matmul of a layer runs: by the scheme that the checkpoint stores the weight in, 16 bits elsewhere."""

from __future__ import annotations

from calc.hardware import Gpu
from calc.model.mixers import LatentAttention
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Part, Weight
from calc.quantization.schemes import Scheme
from calc.serving.formats import WeightFormat
from calc.serving.weights import scheme_of

WIDE = "bf16"
_PEAKS = {"fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4", "int8": "int8"}
_BY_BITS = {"fp8": "int8_weight", "fp8_block": "int8_weight", "int8": "int8_weight", "nvfp4": "int4"}


def gemm_format(spec: ModelSpec, form: WeightFormat, kind: Layer, part: Part, weight: Weight, gpu: Gpu) -> str:
    """The format in which `KernelTimes.gemm` runs this weight; a card without matrix units for it multiplies in 16 bits, as Marlin does.

    A 4-bit format that the checkpoint does not itself declare is for the feed-forward of a model with experts: NVIDIA's checkpoints of
    DeepSeek-V3.1, Kimi-K2, GLM-5, MiniMax-M2.5 and Qwen3.5 leave attention in 16 bits (hf_quant_config.json, exclude_modules),
    DeepSeek's output projection excepted, and Moonshot's 4-bit integers are those of the routed experts alone.
    """
    if not weight.matmul or part.name == "router" or weight.shape[0].size == 1:
        return WIDE
    if form.ftype:
        found = WIDE if form.ftype in ("F16", "BF16") else "int8_weight" if form.ftype == "Q8_0" else "int4"
    else:
        found = _of_scheme(
            scheme_of(spec, form, part, weight, spec.layers.pattern.index(spec.layers.kinds.index(kind)))
        )
        declared = form.quantization is not None and form.quantization is spec.quantization
        if not declared and found in ("nvfp4", "int4") and any(each.expert for each in kind.parts):
            found = found if _in_experts(found, kind, part, weight) else WIDE
    lacks = found in _PEAKS and gpu.lacks(_PEAKS[found])
    return _BY_BITS[found] if lacks else found


def _in_experts(found: str, kind: Layer, part: Part, weight: Weight) -> bool:
    if part.expert or found == "int4":
        return part.expert
    return part.name == "shared_expert" or (isinstance(kind.mixer, LatentAttention) and weight.name == "output")


def _of_scheme(scheme: Scheme) -> str:
    compute, bits = scheme.compute[0], scheme.bits
    if bits >= 16:
        return WIDE
    if compute == "fp8":
        scales = scheme.tensors[1] if len(scheme.tensors) > 1 else None
        return "fp8_block" if scales and scales.columns > 1 else "fp8"
    if compute in ("fp4", "int8"):
        return "nvfp4" if compute == "fp4" else "int8"
    if scheme.label.startswith("mxfp4"):
        return "mxfp4"
    return "int4" if bits <= 5 else "int8_weight"
