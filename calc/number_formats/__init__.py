"""Number formats of weights, activations and caches: their code points, their scales, and what rounding to them loses."""

from calc.number_formats.formats import NumberFormat, number_format, number_formats
from calc.number_formats.quantize import quantize
from calc.number_formats.rounding_error import RoundingError, example, rounding_error

__all__ = [
    "NumberFormat",
    "RoundingError",
    "example",
    "number_format",
    "number_formats",
    "quantize",
    "rounding_error",
]
