"""Floating-point encodings: a sign, an exponent and a mantissa, and every value that they can take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FloatEncoding:
    """A sign bit, `exponent` and `mantissa` bits. `specials`: what the highest exponent is for: "ieee" (infinities and NaN), "nan" (the
    code with all bits set is NaN, the others are numbers) or "none" (all are numbers)."""

    exponent: int
    mantissa: int
    specials: Literal["ieee", "nan", "none"]

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        """What is taken from the stored exponent."""
        return (1 << self.exponent - 1) - 1

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        return 2.0 ** (1 - self.bias - self.mantissa)

    @property
    def largest(self) -> float:
        """The largest finite value."""
        highest = (1 << self.exponent) - (2 if self.specials == "ieee" else 1) - self.bias
        fraction = 2.0 - 2.0**-self.mantissa * (2 if self.specials == "nan" else 1)
        return fraction * 2.0**highest

    def decode(self, code: int) -> float:
        """The value of a bit pattern."""
        sign = -1.0 if code >> (self.bits - 1) else 1.0
        exponent = code >> self.mantissa & (1 << self.exponent) - 1
        fraction = code & (1 << self.mantissa) - 1
        highest = exponent == (1 << self.exponent) - 1
        if highest and self.specials == "ieee":
            return sign * float("inf") if fraction == 0 else float("nan")
        if highest and self.specials == "nan" and fraction == (1 << self.mantissa) - 1:
            return float("nan")
        if exponent == 0:
            return sign * fraction * self.smallest_subnormal
        return sign * (1 + fraction / (1 << self.mantissa)) * 2.0 ** (exponent - self.bias)

    def spacing(self, values: Array) -> Array:
        """The distance to the next value further from zero."""
        _, exponent = np.frexp(np.maximum(np.abs(values), self.smallest_normal))
        return np.asarray(np.ldexp(1.0, exponent - 1 - self.mantissa))

    def round(self, values: Array) -> Array:
        """The nearest value, the even one of two as near; beyond the largest finite value, that one."""
        step = self.spacing(values)
        return np.asarray(np.clip(np.rint(values / step) * step, -self.largest, self.largest))


FP32 = FloatEncoding(8, 23, "ieee")
TF32 = FloatEncoding(8, 10, "ieee")
BF16 = FloatEncoding(8, 7, "ieee")
FP16 = FloatEncoding(5, 10, "ieee")
E4M3 = FloatEncoding(4, 3, "nan")
E5M2 = FloatEncoding(5, 2, "ieee")
E3M2 = FloatEncoding(3, 2, "none")
E2M3 = FloatEncoding(2, 3, "none")
E2M1 = FloatEncoding(2, 1, "none")
