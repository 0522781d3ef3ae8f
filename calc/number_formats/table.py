"""The table of number formats: the encoding of one value, the scale that a block of values shares, and the bits of both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from calc.errors import InputError
from calc.number_formats import floats
from calc.number_formats.floats import FloatEncoding

# NormalFloat: quantiles of the normal distribution (QLoRA, arXiv 2305.14314, appendix E)
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# bitsandbytes' FP4 in twelfths of the block's largest magnitude (bitsandbytes/functional.py, get_4bit_type)
FP4 = tuple(sorted({sign * value / 12 for value in (0, 0.0625, 2, 3, 4, 6, 8, 12) for sign in (1, -1)}))
# llama.cpp's non-linear levels (ggml/src/ggml-common.h, kvalues_iq4nl)
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

_OCP8 = "OCP 8-bit Floating Point Specification 1.0, table 1"
_MX = "OCP Microscaling Formats 1.0, section 5"
_NV = "NVIDIA, Introducing NVFP4: E2M1 in blocks of 16 with an E4M3 scale, and an fp32 scale a tensor"
_IEEE = "IEEE 754-2019"
_GGML = "llama.cpp, ggml/src/ggml-common.h and ggml-quants.c"


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """One format. `bits` are those of one value; `exponent` and `mantissa` are 0 where it is no floating-point number.

    `min` and `max` are the extreme values before the scale. `smallest_normal` and `smallest_subnormal` are None for whole numbers and
    tables. `levels` are the distinct finite values in order, before the scale; () above 8 bits. `block_size` values share `scale_bits`
    bits of scales (None: a whole row or tensor shares them, or there is none). `scale` says what they are.
    """

    name: str
    kind: Literal["float", "integer", "table"]
    bits: int
    sign: int
    exponent: int
    mantissa: int
    min: float
    max: float
    smallest_normal: float | None
    smallest_subnormal: float | None
    levels: tuple[float, ...]
    block_size: int | None
    scale_bits: int
    scale: str
    source: str
    encoding: FloatEncoding | None = None

    @property
    def bits_per_weight(self) -> float:
        """Bits of a value with its share of the block's scales; those of a row or tensor are left out."""
        return self.bits + (self.scale_bits / self.block_size if self.block_size else 0)

    @property
    def has_infinity(self) -> bool:
        return self.encoding is not None and self.encoding.specials == "ieee"

    @property
    def has_nan(self) -> bool:
        return self.encoding is not None and self.encoding.specials != "none"

    def spacing(self, value: float) -> float:
        """The distance from a value, before the scale, to the next one further from zero. 1 for whole numbers; of a table, the gap
        that the value lies in (the last one beyond it)."""
        if self.encoding:
            return float(self.encoding.spacing(abs(value)))  # type: ignore[arg-type]
        if self.kind == "integer":
            return 1.0
        side = [abs(level) for level in self.levels if level == 0 or (level < 0) == (value < 0)]
        edges = sorted({0.0, *side})
        above = next((at for at, edge in enumerate(edges) if edge > abs(value)), len(edges) - 1)
        return edges[above] - edges[above - 1]


def _float(
    name: str, code: FloatEncoding, source: str, block: int | None = None, scale_bits: int = 0, scale: str = ""
) -> NumberFormat:
    points = {code.decode(at) for at in range(2**code.bits)} if code.bits <= 8 else set()
    return NumberFormat(
        name,
        "float",
        code.bits,
        1,
        code.exponent,
        code.mantissa,
        -code.largest,
        code.largest,
        code.smallest_normal,
        code.smallest_subnormal,
        tuple(sorted(point for point in points if abs(point) <= code.largest)),
        block,
        scale_bits,
        scale,
        source,
        code,
    )


def _whole(
    name: str, bits: int, low: int, source: str, block: int | None, scale_bits: int, scale: str, high: int | None = None
) -> NumberFormat:
    levels = tuple(float(level) for level in range(low, (low + 2**bits if high is None else high + 1)))
    sign = int(low < 0)
    return NumberFormat(
        name, "integer", bits, sign, 0, 0, levels[0], levels[-1], None, None, levels, block, scale_bits, scale, source
    )


def _table(name: str, levels: tuple[float, ...], source: str, block: int, scale_bits: int, scale: str) -> NumberFormat:
    values = tuple(float(level) for level in levels)
    return NumberFormat(
        name, "table", 4, 1, 0, 0, values[0], values[-1], None, None, values, block, scale_bits, scale, source
    )


@cache
def formats() -> tuple[NumberFormat, ...]:
    """Every format, by family: plain floats, 8-bit floats, microscaling, NVFP4, bitsandbytes, whole numbers, GGUF's types."""
    tensor = "an fp32 scale a tensor"
    e8m0 = "a power of two (E8M0) for each block"
    largest = "an fp32 scale for each block: its largest magnitude"
    bnb = "bitsandbytes, functional.py; QLoRA, arXiv 2305.14314"
    pair = "an fp16 scale and an fp16 minimum for each block"
    return (
        _float("fp32", floats.FP32, _IEEE),
        _float("tf32", floats.TF32, "NVIDIA A100 Tensor Core GPU Architecture: fp32's exponent, fp16's mantissa, in 32 bits"),
        _float("bf16", floats.BF16, "A Study of BFLOAT16 for Deep Learning Training, arXiv 1905.12322"),
        _float("fp16", floats.FP16, _IEEE),
        _float("fp8-e4m3", floats.E4M3, _OCP8, None, 32, tensor),
        _float("fp8-e5m2", floats.E5M2, _OCP8, None, 32, tensor),
        _float("mxfp8-e4m3", floats.E4M3, _MX, 32, 8, e8m0),
        _float("mxfp8-e5m2", floats.E5M2, _MX, 32, 8, e8m0),
        _float("mxfp6-e3m2", floats.E3M2, _MX, 32, 8, e8m0),
        _float("mxfp6-e2m3", floats.E2M3, _MX, 32, 8, e8m0),
        _float("mxfp4", floats.E2M1, _MX, 32, 8, e8m0),
        _float("nvfp4", floats.E2M1, _NV, 16, 8, "an E4M3 scale for each block, and an fp32 scale a tensor"),
        _table("nf4", NF4, bnb, 64, 32, largest),
        _table("fp4", FP4, bnb, 64, 32, largest),
        _whole("int8", 8, -127, "LLM.int8(), arXiv 2208.07339", None, 32, "an fp32 scale a row", 127),
        _whole("int4", 4, 0, "GPTQ, arXiv 2210.17323, groups of 128", 128, 20, "an fp16 scale and a 4-bit zero for each block"),
        _whole("Q8_0", 8, -127, _GGML, 32, 16, "an fp16 scale for each block", 127),
        _whole("Q6_K", 6, -32, _GGML, 256, 144, "an int8 scale for each 16, times an fp16 scale for each 256"),
        _whole("Q5_K", 5, 0, _GGML, 256, 128, "a 6-bit scale and minimum for each 32, times two fp16 for each 256"),
        _whole("Q5_1", 5, 0, _GGML, 32, 32, pair),
        _whole("Q5_0", 5, -16, _GGML, 32, 16, "an fp16 scale for each block"),
        _whole("Q4_K", 4, 0, _GGML, 256, 128, "a 6-bit scale and minimum for each 32, times two fp16 for each 256"),
        _whole("Q4_1", 4, 0, _GGML, 32, 32, pair),
        _whole("Q4_0", 4, -8, _GGML, 32, 16, "an fp16 scale for each block"),
        _table("IQ4_NL", IQ4_NL, _GGML, 32, 16, "an fp16 scale for each block"),
        _table("IQ4_XS", IQ4_NL, _GGML, 256, 64, "a 6-bit scale for each 32, times an fp16 scale for each 256"),
        _whole("Q3_K", 3, -4, _GGML, 256, 112, "a 6-bit scale for each 16, times an fp16 scale for each 256"),
        _whole("Q2_K", 2, 0, _GGML, 256, 160, "a 4-bit scale and minimum for each 16, times two fp16 for each 256"),
    )  # fmt: skip


def number_format(name: str, field: str = "name") -> NumberFormat:
    """The format of that name. InputError lists the known ones."""
    known = {form.name: form for form in formats()}
    if name not in known:
        raise InputError.of(field, name, f"it must be one of {', '.join(known)}")
    return known[name]
