"""Functions of one, two or three positive numbers, kept on a grid of powers and read in between by interpolation."""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Grid:
    """A function on a grid whose axes are evenly spaced in log2, linear in between; outside it the edge's value is scaled.

    `axes` are (lowest exponent, knots, knots a doubling). Read with floats it returns a float, with arrays an array.
    """

    def __init__(self, function: Callable[..., Array], *axes: tuple[int, int, int]) -> None:
        self._axes = axes
        knots = [2.0 ** (low + np.arange(count) / dense) for low, count, dense in axes]
        mesh = np.meshgrid(*knots, indexing="ij")
        values = np.asarray(function(*mesh), dtype=float)
        self._values = np.broadcast_to(values, mesh[0].shape).copy()
        self._flat: list[float] = self._values.ravel().tolist()
        self._strides = [int(np.prod(self._values.shape[at + 1 :])) for at in range(len(axes))]
        self._knots = [axis.tolist() for axis in knots]

    def __call__(self, *point: Any) -> Any:
        if any(isinstance(each, np.ndarray) for each in point):
            return self._of_arrays(*np.broadcast_arrays(*point))
        corners = [(0, 1.0)]
        for axis, value, stride, knots in zip(self._axes, point, self._strides, self._knots, strict=True):
            at, share = self._cell(axis, float(value), knots)
            corners = [
                corner
                for base, weight in corners
                for corner in ((base + at * stride, weight * (1 - share)), (base + (at + 1) * stride, weight * share))
                if corner[1]
            ]
        return sum(self._flat[at] * weight for at, weight in corners)

    @staticmethod
    def _cell(axis: tuple[int, int, int], value: float, knots: list[float]) -> tuple[int, float]:
        low, count, dense = axis
        if value <= knots[0]:
            return 0, 0.0
        at = min(int((log2(value) - low) * dense), count - 2)
        return at, (value - knots[at]) / (knots[at + 1] - knots[at])

    def _of_arrays(self, *point: Any) -> Array:
        total = np.zeros(point[0].shape)
        cells = []
        for axis, values, knots in zip(self._axes, point, self._knots, strict=True):
            low, count, dense = axis
            edges = np.asarray(knots)
            clipped = np.maximum(values, edges[0])
            at = np.minimum(((np.log2(clipped) - low) * dense).astype(int), count - 2)
            cells.append((at, (clipped - edges[at]) / (edges[at + 1] - edges[at])))
        for corner in range(2 ** len(cells)):
            index, weight = 0, np.ones(point[0].shape)
            for which, ((at, share), stride) in enumerate(zip(cells, self._strides, strict=True)):
                upper = corner >> which & 1
                index = index + (at + upper) * stride
                weight = weight * (share if upper else 1 - share)
            total = total + self._values.ravel()[index] * weight
        return total
