"""Number formats of weights, activations and caches: their code points, their scales, and what rounding to them loses."""

from calc.number_formats.quantize import quantize
from calc.number_formats.rounding_error import RoundingError, example, rounding_error
from calc.number_formats.table import NumberFormat, formats, number_format

__all__ = [
    "NumberFormat",
    "RoundingError",
    "example",
    "formats",
    "number_format",
    "quantize",
    "rounding_error",
]
