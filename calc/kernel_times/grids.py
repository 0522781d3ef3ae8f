"""Multilinear interpolation over knots: how a measured table is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Numbers = int | float | npt.NDArray[np.int64] | npt.NDArray[np.float64]
_SMALLEST = 2.0**-30  # a coordinate of zero has no logarithm


@dataclass(frozen=True)
class Grid:
    """The logarithm (base 2) of measured time over reference time, at every combination of the axes' knots.

    `axes` are ascending logarithms (base 2) of the knots; `values` has one dimension an axis.
    """

    axes: tuple[FloatArray, ...]
    values: FloatArray

    @cached_property
    def _flat(self) -> FloatArray:
        return np.ascontiguousarray(self.values).reshape(-1)

    @cached_property
    def _steps(self) -> tuple[tuple[int, FloatArray, int], ...]:
        """Each axis that has several knots: its place, its knots and how far its neighbours lie apart in the flat values."""
        strides = np.cumprod([1, *(len(axis) for axis in reversed(self.axes))])[:-1][::-1]
        return tuple(
            (place, axis, int(stride))
            for place, (axis, stride) in enumerate(zip(self.axes, strides, strict=True))
            if len(axis) > 1
        )

    @cached_property
    def _corners(self) -> npt.NDArray[np.int64]:
        """Where the corners of a cell lie, counted from its lowest; the last axis varies fastest."""
        offsets = np.zeros(1, dtype=np.int64)
        for _, _, stride in self._steps:
            offsets = (offsets[:, None] + np.array([0, stride])).reshape(-1)
        return offsets

    def factor(self, point: Sequence[Numbers]) -> FloatArray:
        """Measured over reference time at a point, one coordinate an axis; beyond the outermost knots it stays as it is there."""
        index: npt.NDArray[np.int64] | int = 0
        shares: list[FloatArray] = []
        for place, axis, stride in self._steps:
            position = np.log2(np.maximum(point[place], _SMALLEST))
            low = np.minimum(np.maximum(axis.searchsorted(position, side="right") - 1, 0), len(axis) - 2)
            below = axis[low]
            shares.append(np.minimum(np.maximum((position - below) / (axis[low + 1] - below), 0.0), 1.0))
            index = index + low * stride
        values = self._flat[np.asarray(index)[..., None] + self._corners]
        for share in reversed(shares):
            low_half, high_half = values[..., ::2], values[..., 1::2]
            values = low_half + (high_half - low_half) * np.asarray(share)[..., None]
        return np.asarray(np.exp2(values[..., 0]))
