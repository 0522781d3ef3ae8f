"""Formats of weights and of the KV cache: which scheme each weight is stored by, and the bits of a cached element."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from calc.breakdown import Number
from calc.model.spec import ModelSpec
from calc.quantization import schemes
from calc.quantization.declared import named
from calc.quantization.format import Quantization
from calc.quantization.schemes import BF16_COMPUTE, Scheme, Tensor


@dataclass(frozen=True, slots=True)
class Bits:
    """Bits of one element, scales included, as a number and as a formula."""

    value: Fraction
    latex: str
    numbers: Mapping[str, Number] = field(default_factory=dict, hash=False)


def plain(bits: int) -> Bits:
    return Bits(Fraction(bits), str(bits))


def block(size: int, elements: int) -> Bits:
    """A block of so many elements in so many bytes (ggml-common.h in llama.cpp)."""
    return Bits(Fraction(8 * size, elements), r"\frac{8 \cdot <B_q>}{<n_q>}", {"B_q": size, "n_q": elements})


FP32, BF16 = plain(32), plain(16)

# bytes and elements of a block (ggml-common.h in llama.cpp)
GGML_BLOCKS = {
    "Q8_0": (34, 32),
    "Q5_1": (24, 32),
    "Q5_0": (22, 32),
    "Q4_1": (20, 32),
    "Q4_0": (18, 32),
    "IQ4_NL": (18, 32),
    "Q2_K": (84, 256),
    "Q3_K": (110, 256),
    "Q4_K": (144, 256),
    "Q5_K": (176, 256),
    "Q6_K": (210, 256),
    "IQ4_XS": (136, 256),
    "IQ3_S": (110, 256),
    "IQ3_XXS": (98, 256),
    "IQ2_S": (82, 256),
    "IQ2_XS": (74, 256),
    "IQ2_XXS": (66, 256),
    "IQ1_M": (56, 256),
    "IQ1_S": (50, 256),
    "MXFP4": (17, 32),
    "BF16": (2, 1),
    "F16": (2, 1),
    "F32": (4, 1),
}
GGML: Mapping[str, Bits] = {name: block(*sizes) for name, sizes in GGML_BLOCKS.items()}

_LLAMA_CPP = "https://github.com/ggml-org/llama.cpp"

KV_FORMATS: Mapping[str, Bits] = {
    "auto": BF16,  # where the checkpoint declares none
    "bf16": BF16,
    "fp16": BF16,
    "fp32": FP32,
    "fp8": plain(8),
    "int8": plain(8),
    "int4": plain(4),
    **{name: GGML[name.upper()] for name in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")},
}
# mlx-lm's --kv-bits: groups of 64 with a 16-bit scale and a 16-bit bias
MLX_KV: Mapping[str, Bits] = {
    f"int{bits}": Bits(Fraction(64 * bits + 32, 64), r"\frac{64 \cdot <b> + 32}{64}", {"b": bits}) for bits in (8, 4)
}
KV_ASSUMES = {
    "fp8": "one scale a tensor or a layer is left out",
    "int8": "scales are left out",
    "int4": "scales are left out",
}


@dataclass(frozen=True, eq=False)
class WeightFormat:
    """How weights are served: `name` is that of `--weights`, `label` says it with its details, `compute` is the number format of its
    matmuls in order of preference. `wide` stores what `quantization` (None: nothing is quantised) leaves as it is; `ftype` is the
    mix of a GGUF file.
    """

    name: str
    label: str
    compute: tuple[str, ...]
    wide: Scheme
    quantization: Quantization | None = None
    ftype: str = ""


PLAIN: Mapping[str, Scheme] = {scheme.label: scheme for scheme in (schemes.BF16, schemes.FP16, schemes.FP32)}

_MIX = "llama.cpp, src/llama-quant.cpp: the type that llama-quantize gives each tensor without an importance matrix"
_MIX_URL = f"{_LLAMA_CPP}/blob/007dbbf3fd17eefe9b47fee45f48f7ba5e62b714/src/llama-quant.cpp"
_TYPICAL = (
    "norms, biases and the router keep fp32",
    "typical: published files of the same name may differ; the file decides",
)
GGML_SCHEMES: Mapping[str, Scheme] = {
    name: Scheme(name, (Tensor("", 8 * size, 1, elements),), BF16_COMPUTE, _MIX, _MIX_URL, _TYPICAL)
    for name, (size, elements) in GGML_BLOCKS.items()
}


def weight_format(spec: ModelSpec, name: str) -> WeightFormat:
    """The format of that name for a model: "auto" is what its checkpoint declares, bf16 where it declares nothing.

    A format that the checkpoint declares has the checkpoint's details: its groups, and the modules that it leaves as they are.
    """
    own = spec.quantization
    if name == "auto" and own is None:
        name = "bf16"
    if name in PLAIN:
        return WeightFormat(name, name, PLAIN[name].compute, PLAIN[name])
    if name.startswith("gguf-"):
        return WeightFormat(name, name, BF16_COMPUTE, GGML_SCHEMES["F32"], None, name.removeprefix("gguf-"))
    if own and name in ("auto", own.family):
        return WeightFormat(
            own.family, f"{own.label}, as the checkpoint declares", own.scheme.compute, PLAIN["bf16"], own
        )
    usual = named()[name]
    return WeightFormat(name, usual.label, usual.scheme.compute, PLAIN["bf16"], usual)
