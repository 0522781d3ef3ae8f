"""Formats of weights and of the KV cache: exact bits an element with their block scales, and what each leaves wide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from calc.breakdown import Number


@dataclass(frozen=True, slots=True)
class Bits:
    """Bits of one element, scales included, as a number and as a formula. `per_row`: one scale a row, of so many bits."""

    value: Fraction
    latex: str
    numbers: Mapping[str, Number] = field(default_factory=dict, hash=False)
    per_row: int = 0


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
    "F16": (2, 1),
    "F32": (4, 1),
}
GGML: Mapping[str, Bits] = {name: block(*sizes) for name, sizes in GGML_BLOCKS.items()}

_LLAMA_CPP = "https://github.com/ggml-org/llama.cpp"

KV_FORMATS: Mapping[str, Bits] = {
    "bf16": BF16,
    "fp16": BF16,
    "fp32": FP32,
    "fp8": plain(8),
    "int8": plain(8),
    "int4": plain(4),
    **{name: GGML[name.upper()] for name in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")},
}
KV_ASSUMES = {
    "fp8": "one scale a tensor or a layer is left out",
    "int8": "scales are left out",
    "int4": "scales are left out",
}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a checkpoint of that format stores its weights.

    `linear` is for the layers' matmuls (only the experts' where `experts_only` and the model has any), `wide` for the rest: the
    router, norms, biases, embedding and head. `compute` is the number format of its matmuls, in order of preference.
    """

    name: str
    linear: Bits
    wide: Bits
    compute: tuple[str, ...]
    source: str
    url: str
    assumes: tuple[str, ...] = ()
    experts_only: bool = False


_16BIT = ("bf16", "fp16")
_KEPT = (
    "the router, norms, biases, embedding and head keep 16 bits",
    "the layers' dimensions are multiples of the group",
)
_PLAIN = ("PyTorch number formats", "https://docs.pytorch.org/docs/stable/tensor_attributes.html")


def _grouped(bits: int, over: int, size: int) -> Bits:
    """So many bits an element and `over` bits for each group of `size`."""
    return Bits(bits + Fraction(over, size), rf"({bits} + \frac{{{over}}}{{<g_q>}})", {"g_q": size})


_INT4 = _grouped(4, 20, 128)
_NF4 = Bits(
    4 + Fraction(8, 64) + Fraction(32, 64 * 256),
    r"(4 + \frac{8}{<g_q>} + \frac{32}{<g_q> \cdot <g_{q2}>})",
    {"g_q": 64, "g_{q2}": 256},
)
_TABLE = (
    WeightFormat("bf16", BF16, BF16, _16BIT, *_PLAIN),
    WeightFormat("fp16", BF16, BF16, ("fp16",), *_PLAIN),
    WeightFormat("fp32", FP32, FP32, ("fp32",), *_PLAIN),
    WeightFormat(
        "fp8",
        Bits(8 + Fraction(32, 128**2), r"(8 + \frac{32}{<g_q>^{2}})", {"g_q": 128}),
        BF16,
        ("fp8",),
        "DeepSeek-V3, arXiv 2412.19437, section 3.3: one fp32 scale for each 128 x 128 block",
        "https://arxiv.org/abs/2412.19437",
        _KEPT,
    ),
    WeightFormat(
        "int8",
        Bits(Fraction(8), r"(8 + \frac{32}{<n_{in}>})", per_row=32),
        BF16,
        ("int8",),
        "LLM.int8(), arXiv 2208.07339: one fp32 scale for each row",
        "https://arxiv.org/abs/2208.07339",
        _KEPT[:1],
    ),
    WeightFormat(
        "gptq-int4",
        _INT4,
        BF16,
        _16BIT,
        "GPTQ, arXiv 2210.17323: a 16-bit scale and a 4-bit zero for each group of 128",
        "https://arxiv.org/abs/2210.17323",
        _KEPT,
    ),
    WeightFormat(
        "awq-int4",
        _INT4,
        BF16,
        _16BIT,
        "AWQ, arXiv 2306.00978: a 16-bit scale and a 4-bit zero for each group of 128",
        "https://arxiv.org/abs/2306.00978",
        _KEPT,
    ),
    WeightFormat(
        "nf4",
        _NF4,
        BF16,
        _16BIT,
        "QLoRA, arXiv 2305.14314, section 3: NF4 with double quantisation",
        "https://arxiv.org/abs/2305.14314",
        _KEPT,
    ),
    WeightFormat(
        "mxfp4",
        _grouped(4, 8, 32),
        BF16,
        _16BIT,
        "OCP Microscaling Formats 1.0: an 8-bit scale for each 32; on experts only, as in gpt-oss",
        "https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf",
        ("everything but the experts keeps 16 bits; a model without experts has all its layers' matmuls in MXFP4",),
        experts_only=True,
    ),
    WeightFormat(
        "nvfp4",
        _grouped(4, 8, 16),
        BF16,
        ("fp4",),
        "NVIDIA, Introducing NVFP4: an fp8 scale for each 16",
        "https://developer.nvidia.com/blog/introducing-nvfp4-for-efficient-and-accurate-low-precision-inference/",
        (*_KEPT, "one fp32 scale a tensor is left out"),
    ),
)
WEIGHT_FORMATS: Mapping[str, WeightFormat] = {row.name: row for row in _TABLE}

_MIX = "llama.cpp, src/llama-quant.cpp: the type that llama-quantize gives each tensor without an importance matrix"


def gguf_format(name: str) -> WeightFormat:
    """A GGUF mix: the types of its tensors are chosen one by one (`calc.serving.gguf`); norms and the router keep 32 bits."""
    assumes = (
        "norms, biases and the router keep fp32",
        "typical: published files of the same name may differ; the file decides",
    )
    return WeightFormat(
        name,
        GGML["F16"],
        FP32,
        _16BIT,
        _MIX,
        f"{_LLAMA_CPP}/blob/007dbbf3fd17eefe9b47fee45f48f7ba5e62b714/src/llama-quant.cpp",
        assumes,
    )
