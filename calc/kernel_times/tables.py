"""The measured tables as they are kept, and which of them stands for a GPU.

data/kernel_times/index.json says where the measurements are from and lists every table with its axes, engine, version and error on
shapes held out of its making; the numbers are in one .npz file a GPU (whole 1/128ths of a factor of two).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from calc.hardware import Gpu
from calc.kernel_times.grids import FloatArray, Grid

DATA: Final = Path(__file__).parent.parent / "data" / "kernel_times"
STEPS: Final = 128  # of the kept integers in a factor of two

# the GPUs with tables whose kernels are nearest, nearest first, by compute capability or architecture
_RELATIVES: Final = {
    "7": ("a100-sxm-80gb",),
    "8.0": ("a100-sxm-80gb",),
    "8": ("l40s-48gb", "a100-sxm-80gb"),
    "9": ("h100-sxm-80gb", "h200-141gb"),
    "10.0": ("b200-180gb", "gb200-186gb", "b300-288gb"),
    "10.3": ("b300-288gb", "gb300-288gb", "b200-180gb"),
    "12": ("rtx-pro-6000-server-96gb", "b200-180gb"),
    "": ("h100-sxm-80gb", "h200-141gb", "b200-180gb"),  # other vendors
}


@dataclass(frozen=True, slots=True)
class Table:
    """One measured table: a kernel kind in a number format, of an engine's version on a GPU."""

    gpu: str
    kind: str
    dtype: str
    engine: str
    version: str
    error: tuple[float, float]  # median and 90th percentile, relative, on held-out shapes
    grid: Grid
    correction: Grid | None  # of experts: what one model's shape adds, by its place in `shapes`
    shapes: dict[tuple[int, ...], int]  # hidden, intermediate, number of experts, top_k


@cache
def index() -> dict[str, Any]:
    """The list of tables, with the source and licence of the measurements."""
    found: dict[str, Any] = json.loads((DATA / "index.json").read_text(encoding="utf-8"))
    return found


@cache
def _arrays(gpu: str) -> Any:
    return np.load(DATA / f"{gpu}.npz", allow_pickle=False)


@cache
def rows() -> tuple[dict[str, Any], ...]:
    """Every table's row of the index by column, those that stand for "any engine" first."""
    return tuple(dict(zip(index()["columns"], row, strict=True)) for row in index()["rows"])


@cache
def table(gpu: str, kind: str, dtype: str, engine: str | None) -> Table | None:
    """That GPU's table; of the engine, or of the one that the index lists first (`engine` None, or an engine without one)."""
    found = [row for row in rows() if (row["gpu"], row["kind"], row["dtype"]) == (gpu, kind, dtype)]
    row = next((row for row in found if row["engine"] == engine), found[0] if found else None)
    if row is None:
        return None
    packed = _arrays(gpu)[row["array"]]
    grid = _grid(packed, _logarithms(index()["axes"][row["axes"]]))
    shapes = {tuple(index()["shapes"][number]): place for place, number in enumerate(row["shapes"])}
    correction = None
    if shapes:
        axes = (np.arange(len(shapes), dtype=float), *_logarithms(index()["shape_axes"]))
        correction = _grid(packed[:, grid.values.size :], axes)
    return Table(gpu, kind, dtype, row["engine"], row["version"], (row["median"], row["p90"]), grid, correction, shapes)


def longest(axes: Sequence[FloatArray]) -> int:
    """The axis along which the kept integers are differences."""
    return max(range(len(axes)), key=lambda place: len(axes[place]))


def _grid(packed: npt.NDArray[np.uint8], axes: tuple[FloatArray, ...]) -> Grid:
    """The grid from its two planes of bytes: low and high bytes of differences, whose sign is the lowest bit."""
    shape = [len(axis) for axis in axes]
    low, high = packed[:, : math.prod(shape)].astype(np.int64)
    folded = low + 256 * high
    steps = np.where(folded % 2, -(folded + 1) // 2, folded // 2).reshape(shape)
    return Grid(axes, np.cumsum(steps, axis=longest(axes)) / STEPS)


def _logarithms(axes: dict[str, list[float]]) -> tuple[FloatArray, ...]:
    return tuple(np.log2(np.asarray(knots, dtype=float)) for knots in axes.values())


def relatives(gpu: Gpu) -> tuple[str, ...]:
    """The GPUs whose tables stand for this one's, nearest first: itself where it was measured, then its kin."""
    capability = gpu.compute_capability or ""
    keys = (capability, capability.split(".")[0], "")
    near = next(_RELATIVES[key] for key in keys if key in _RELATIVES)
    own = (gpu.name,) if gpu.name in index()["gpus"] else ()
    return own + tuple(name for name in near if name != gpu.name)
