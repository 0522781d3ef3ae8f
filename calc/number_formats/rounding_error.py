"""What rounding to a format loses, and arrays that look like those of a language model to try it on."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log10
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from calc.number_formats.quantize import quantize


@dataclass(frozen=True, slots=True)
class RoundingError:
    """Of the rounded values against the given ones: root mean square, the largest, the root mean square as a share of the values' own,
    the ratio of signal to error in dB, and the share of values other than 0 that became 0."""

    rms: float
    largest: float
    relative_rms: float
    signal_to_noise_db: float
    became_zero: float


def rounding_error(values: NDArray[np.floating], name: str) -> RoundingError:
    """The error of `quantize(values, name)`. InputError as there."""
    given = np.asarray(values, dtype=np.float64)
    rounded = quantize(given, name).astype(np.float64)
    rms = float(np.sqrt(np.mean((rounded - given) ** 2)))
    signal = float(np.sqrt(np.mean(given**2)))
    nonzero = given != 0
    return RoundingError(
        rms,
        float(np.abs(rounded - given).max()),
        rms / signal if signal else 0.0,
        20 * log10(signal / rms) if rms and signal else inf,
        float(np.mean(rounded[nonzero] == 0)) if nonzero.any() else 0.0,
    )


def example(
    kind: Literal["weights", "activations"] = "weights", rows: int = 64, columns: int = 1024
) -> NDArray[np.float32]:
    """An array (rows, columns) like one of a model, the same each time: made, not taken from a model.

    weights: normal around zero (QLoRA, arXiv 2305.14314, appendix F), of deviation 0.02 (GPT-2's initialisation).
    activations: normal of deviation 1, and in 1 of 256 columns 20 times that (LLM.int8(), arXiv 2208.07339, section 4: few features
    hold values up to 20 times larger than the others).
    """
    random = np.random.default_rng(0)
    values = random.standard_normal((rows, columns), dtype=np.float32)
    if kind == "weights":
        return values * np.float32(0.02)
    values[:, random.permutation(columns)[: max(1, columns // 256)]] *= 20
    return values
