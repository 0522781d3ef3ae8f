"""Functions of one, two or three positive numbers, kept on a grid of powers and read in between by interpolation."""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Grid:
    """A function on a grid whose axes are evenly spaced in log2, linear in between; below it the edge holds, beyond it the last slope.

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
        self._at = (self._one, self._two, self._three)[len(axes) - 1]

    def __call__(self, *point: Any) -> Any:
        for each in point:
            if type(each) is np.ndarray:
                return self._of_arrays(*np.broadcast_arrays(*point))
        return self._at(*point)

    # a simulator reads these a hundred thousand times a second, so they are written out

    def _cell(self, axis: int, value: float) -> tuple[int, float]:
        low, count, dense = self._axes[axis]
        knots = self._knots[axis]
        if value <= knots[0]:
            return 0, 0.0
        at = min(int((log2(value) - low) * dense), count - 2)
        return at, (value - knots[at]) / (knots[at + 1] - knots[at])

    def _one(self, x: float) -> float:
        at, share = self._cell(0, x)
        value = self._flat[at]
        return value + share * (self._flat[at + 1] - value)

    def _two(self, x: float, y: float) -> float:
        row, down = self._cell(0, x)
        column, right = self._cell(1, y)
        return self._plane(row * self._strides[0] + column, self._strides[0], down, right)

    def _three(self, x: float, y: float, z: float) -> float:
        page, over = self._cell(0, x)
        row, down = self._cell(1, y)
        column, right = self._cell(2, z)
        start = page * self._strides[0] + row * self._strides[1] + column
        near = self._plane(start, self._strides[1], down, right)
        if not over:
            return near
        return near + over * (self._plane(start + self._strides[0], self._strides[1], down, right) - near)

    def _plane(self, start: int, stride: int, down: float, right: float) -> float:
        flat, below = self._flat, start + stride
        upper = flat[start] + right * (flat[start + 1] - flat[start])
        return upper + down * (flat[below] + right * (flat[below + 1] - flat[below]) - upper)

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
