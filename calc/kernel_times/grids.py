"""Multilinear interpolation over knots: how a measured table is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Numbers = int | float | npt.NDArray[np.int64] | npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Grid:
    """The logarithm (base 2) of measured time over reference time, at every combination of the axes' knots.

    `axes` are ascending logarithms (base 2) of the knots; `values` has one dimension an axis.
    """

    axes: tuple[FloatArray, ...]
    values: FloatArray

    def factor(self, point: Sequence[Numbers]) -> FloatArray:
        """Measured over reference time at a point, one coordinate an axis; beyond the outermost knots it stays as it is there."""
        flat = self.values.reshape(-1)
        index: npt.NDArray[np.int64] | int = 0
        weights: list[FloatArray] = []
        strides: list[int] = []
        stride = flat.size
        for axis, coordinate in zip(self.axes, point, strict=True):
            stride //= len(axis)
            if len(axis) == 1:
                continue
            position = np.log2(np.maximum(coordinate, 2.0**-30))
            low = np.clip(axis.searchsorted(position, side="right") - 1, 0, len(axis) - 2)
            weights.append(np.clip((position - axis[low]) / (axis[low + 1] - axis[low]), 0.0, 1.0))
            strides.append(stride)
            index = index + low * stride
        return np.exp2(_blend(flat, index, weights, strides))


def _blend(
    flat: FloatArray, index: npt.NDArray[np.int64] | int, weights: list[FloatArray], strides: list[int]
) -> FloatArray:
    """The weighted mean of the corners of the cell whose lowest corner is at `index`: the last axis varies fastest."""
    offsets = np.zeros(1, dtype=np.int64)
    for stride in strides:
        offsets = (offsets[:, None] + np.array([0, stride])).reshape(-1)
    values = flat[np.asarray(index)[..., None] + offsets]
    for weight in reversed(weights):
        pairs = values.reshape(*values.shape[:-1], -1, 2)
        share = np.asarray(weight)[..., None]
        values = pairs[..., 0] * (1 - share) + pairs[..., 1] * share
    return np.asarray(values[..., 0])
