"""Number formats: bits, layout and range. Sub-byte types count bits, and bytes round up once, at the end."""

from __future__ import annotations

from dataclasses import dataclass

from calc.errors import InputError
from calc.units import ceil_div


@dataclass(frozen=True, slots=True)
class DType:
    """A number format. `exponent` and `mantissa` are bits (0 for integers); `largest` is the largest finite value."""

    name: str
    bits: int
    exponent: int
    mantissa: int
    largest: float

    def bytes_of(self, elements: int) -> int:
        """Bytes of that many elements, rounded up to whole bytes."""
        return ceil_div(elements * self.bits, 8)


# name, bits, exponent, mantissa, largest finite value (IEEE 754; OCP 8-bit Floating Point Specification; OCP Microscaling)
_TABLE = (
    ("fp64", 64, 11, 52, 1.7976931348623157e308),
    ("fp32", 32, 8, 23, 3.4028234663852886e38),
    ("fp16", 16, 5, 10, 65504.0),
    ("bf16", 16, 8, 7, 3.3895313892515355e38),
    ("fp8", 8, 4, 3, 448.0),
    ("fp8_e4m3", 8, 4, 3, 448.0),
    ("fp8_e5m2", 8, 5, 2, 57344.0),
    ("fp4", 4, 2, 1, 6.0),
    ("int64", 64, 0, 0, float(2**63 - 1)),
    ("int32", 32, 0, 0, float(2**31 - 1)),
    ("int8", 8, 0, 0, 127.0),
    ("int4", 4, 0, 0, 7.0),
    ("bool", 8, 0, 0, 1.0),
)
DTYPES = {row[0]: DType(*row) for row in _TABLE}


def dtype(name: str, field: str = "dtype") -> DType:
    """The format of that name; InputError lists the known ones. `field` is what the user set."""
    if name not in DTYPES:
        raise InputError.of(field, name, f"it must be one of {', '.join(DTYPES)}")
    return DTYPES[name]
