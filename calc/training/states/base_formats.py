"""The formats in which the frozen weights under adapters lie: what each keeps for a weight, and next to each weight's tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

BaseFormat = Literal["nf4", "nf4-single", "fp4", "gptq-int4"]
_BNB_URL: Final = "https://arxiv.org/abs/2305.14314"
_DOUBLE: Final = (
    "QLoRA, arXiv 2305.14314, section 3: NF4 in blocks of 64, absmax in 8 bits by groups of 256 (bitsandbytes 0.50)"
)
_SINGLE: Final = "QLoRA, arXiv 2305.14314, section 3: 4 bits in blocks of 64, one fp32 absmax each (bitsandbytes 0.50)"


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a quantised weight: `bytes` for every `per` elements. `sharded`: it is a parameter, which FSDP divides; what
    bitsandbytes keeps in a weight's quant_state lies whole on each rank."""

    name: str
    bytes: int
    per: int
    sharded: bool


@dataclass(frozen=True, slots=True)
class BaseLedger:
    """What a format keeps. `tables` are bytes next to each weight's tensor."""

    stored: tuple[Stored, ...]
    tables: tuple[tuple[str, int], ...]
    source: str
    url: str
    note: str


_FOUR_BITS: Final = Stored("weight", 1, 2, sharded=True)
_ABSMAX: Final = (_FOUR_BITS, Stored("absmax", 4, 64, sharded=False))
BASE_FORMATS: Final = {
    "nf4": BaseLedger(
        (
            _FOUR_BITS,
            Stored("absmax", 1, 64, sharded=False),
            Stored("absmax_scale", 4, 64 * 256, sharded=False),
        ),
        (("levels", 4 * 16), ("absmax_levels", 4 * 256), ("absmax_mean", 4)),
        _DOUBLE,
        _BNB_URL,
        "in NF4 with double quantisation",
    ),
    "nf4-single": BaseLedger(_ABSMAX, (("levels", 4 * 16),), _SINGLE, _BNB_URL, "in NF4 without double quantisation"),
    "fp4": BaseLedger(_ABSMAX, (("levels", 4 * 16),), _SINGLE, _BNB_URL, "in FP4 without double quantisation"),
    "gptq-int4": BaseLedger(
        (
            Stored("qweight", 1, 2, sharded=True),
            Stored("scales", 2, 128, sharded=True),
            Stored("qzeros", 1, 2 * 128, sharded=True),
        ),
        (),
        "AutoGPTQ 0.7.1, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py: groups of 128, a 16-bit scale and a 4-bit zero each",
        "https://github.com/AutoGPTQ/AutoGPTQ/blob/v0.7.1/auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py",
        "in GPTQ's int4 with groups of 128 (AutoGPTQ without its exllama kernels; g_idx is not counted)",
    ),
}
