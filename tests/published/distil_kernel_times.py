"""Makes calc/data/kernel_times/ and tests/published/kernel_times.json from the measurements in a public package.

    pip download --no-deps aiconfigurator-core==0.12.0 && unzip aiconfigurator_core-0.12.0-*.whl -d unpacked
    pip install pandas pyarrow scipy
    python tests/published/distil_kernel_times.py unpacked/aiconfigurator_core

Each table of the package is fitted by a grid over its shape (calc.kernel_times.grids): least squares on the logarithm of measured
over reference time, where each measurement lies between its 2^D nearest knots; outliers weigh less, and a small penalty on bends
fills cells without measurements. A fifth of the shapes stays out of the fit; the error on them is written beside the table, and
a sample of them becomes the test's data. Times are kept as integers of 1/256 of a factor of two.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sparse
from scipy.sparse.linalg import spsolve

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from calc.hardware import gpus  # noqa: E402
from calc.kernel_times import work  # noqa: E402
from calc.kernel_times.grids import Grid  # noqa: E402
from calc.kernel_times.tables import DATA, STEPS  # noqa: E402
from calc.kernel_times.work import FIXED_SECONDS, Work  # noqa: E402

ABOUT = {
    "about": "Times of kernels on real GPUs, distilled by tests/published/distil_kernel_times.py: see there for the method.",
    "source": "PyPI package aiconfigurator-core 0.12.0, systems/data/**/*.parquet",
    "copyright": "Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES",
    "license": "Apache-2.0",
    "changes": "measurements replaced by grids fitted to four fifths of the shapes; latencies relative to a reference time",
}
GPUS = {
    "a100_sxm": "a100-sxm-80gb",
    "h100_sxm": "h100-sxm-80gb",
    "h200_sxm": "h200-141gb",
    "b200_sxm": "b200-180gb",
    "b300_sxm": "b300-288gb",
    "gb200": "gb200-186gb",
    "gb300": "gb300-288gb",
    "l40s": "l40s-48gb",
    "rtx_pro_6000_server": "rtx-pro-6000-server-96gb",
}
SAMPLE = 12  # held-out shapes of each table that the test keeps
OUTLIER = 0.05  # a misfit (in log 2) from which a measurement weighs less


def powers(low: int, high: int, step: int = 1) -> list[float]:
    return [float(2**e) for e in range(low, high + 1, step)]


AXES: dict[str, dict[str, list[float]]] = {
    "gemm": {
        "m": [1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 32768],
        "n": [*powers(7, 14), 65536],
        "k": [*powers(7, 14), 65536],
    },
    "collective": {"bytes": powers(9, 30, 2), "ranks": [2, 4, 8]},
}


@dataclass
class Points:
    """Measurements of one table: their place on the axes, seconds, reference seconds, and the shape each belongs to."""

    kind: str
    dtype: str
    axes: str
    kernel: Work
    reference: np.ndarray
    seconds: np.ndarray
    shape: np.ndarray  # what is held out goes by this
    arguments: dict[str, np.ndarray]  # what the test asks with


def main() -> None:
    package = Path(sys.argv[1])
    tables: list[dict[str, Any]] = []
    arrays: dict[str, dict[str, np.ndarray]] = {}
    sample: list[dict[str, Any]] = []
    for folder, gpu in GPUS.items():
        for family in FAMILIES:
            for engine, version, points in family(package / "systems" / "data" / folder, gpu):
                row, values, held = distil(gpu, engine, version, points)
                row["array"] = f"{len(arrays.setdefault(gpu, {}))}"
                arrays[gpu][row["array"]] = values
                tables.append(row)
                sample += held
                print(row, flush=True)
    tables.sort(key=preference)
    DATA.mkdir(exist_ok=True)
    for gpu, kept in arrays.items():
        np.savez_compressed(DATA / f"{gpu}.npz", **kept)
    index = ABOUT | {"gpus": {gpu: reference_of(gpu) for gpu in arrays}, "axes": AXES, "tables": tables}
    write(DATA / "index.json", index)
    write(Path(__file__).parent / "kernel_times.json", ABOUT | {"rows": sample})


def write(path: Path, value: dict[str, Any]) -> None:
    """JSON with one line an entry of the longest list, so that a change shows as one line."""
    text = json.dumps(value, indent=0, separators=(",", ":"))
    for opening in ("tables", "rows"):
        if opening in value:
            head = {k: v for k, v in value.items() if k != opening}
            lines = ",\n".join(json.dumps(row) for row in value[opening])
            text = json.dumps(head, indent=1)[:-2] + f',\n "{opening}": [\n{lines}\n ]\n}}\n'
    path.write_text(text, encoding="utf-8")


def reference_of(gpu: str) -> dict[str, Any]:
    """The peaks and bandwidths that the reference times were formed with."""
    facts = gpus()[gpu]
    return {
        "peak_flops": dict(facts.peaks),
        "memory_bandwidth": facts.memory_bandwidth,
        "link_bandwidth": facts.link_bandwidth or facts.pcie_bandwidth,
    }


def preference(row: dict[str, Any]) -> tuple[Any, ...]:
    """Tables of one kind and format in the order in which they stand for "any engine"."""
    quantises = row["kind"] == "gemm" and row["dtype"] == "fp8" and row["engine"] == "trtllm"  # the activation, inside
    host = (
        row["kind"] == "gemm" and row["dtype"] == "fp8_block" and row["engine"] == "vllm"
    )  # launches DeepGEMM eagerly
    return (row["gpu"], row["kind"], row["dtype"], quantises or host, row["median"])


def distil(
    gpu: str, engine: str, version: str, points: Points
) -> tuple[dict[str, Any], np.ndarray, list[dict[str, Any]]]:
    """The table's row of the index, its integers, and a sample of its held-out measurements."""
    axes = [np.log2(np.asarray(knots, dtype=float)) for knots in AXES[points.axes].values()]
    place = [np.broadcast_to(np.log2(np.maximum(x, 2.0**-30)), points.seconds.shape) for x in points.kernel.point]
    target = np.log2(points.seconds / points.reference)
    held = held_out(points.shape)
    values = fit(axes, [x[~held] for x in place], target[~held])
    kept = np.clip(np.round(values * STEPS), -32768, 32767).astype(np.int16)
    grid = Grid(tuple(axes), (kept / STEPS).reshape([len(axis) for axis in axes]))
    predicted = points.reference * grid.factor([2.0**x for x in place])
    error = np.abs(predicted / points.seconds - 1)
    row = {
        "gpu": gpu,
        "kind": points.kind,
        "dtype": points.dtype,
        "engine": engine,
        "version": version,
        "axes": points.axes,
        "median": round(float(np.median(error[held])), 4),
        "p90": round(float(np.percentile(error[held], 90)), 4),
        "held_out": int(held.sum()),
        "fitted": int((~held).sum()),
    }
    chosen = np.random.default_rng(1).choice(np.flatnonzero(held), min(SAMPLE, held.sum()), replace=False)
    rows = [
        {
            "gpu": gpu,
            "engine": engine,
            "kind": points.kind,
            "dtype": points.dtype,
            "seconds": float(f"{points.seconds[i]:.5g}"),
        }
        | {name: plain(np.broadcast_to(value, points.seconds.shape)[i]) for name, value in points.arguments.items()}
        for i in sorted(chosen)
    ]
    return row, kept, rows


def plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def held_out(shape: np.ndarray) -> np.ndarray:
    """A fifth of the shapes, by a checksum of each: the same ones in every run."""
    codes, inverse = np.unique(shape.astype(str), return_inverse=True)
    out = np.array([zlib.crc32(code.encode()) % 5 == 0 for code in codes])
    return out[inverse]


def fit(
    axes: Sequence[np.ndarray], place: Sequence[np.ndarray], target: np.ndarray, stiffness: float = 0.02
) -> np.ndarray:
    """The grid's values: iterated least squares of the multilinear interpolation, outliers weighed down."""
    matrix, size = interpolation(axes, place), int(np.prod([len(axis) for axis in axes]))
    bends = second_differences([len(axis) for axis in axes])
    smooth = bends.T @ bends * stiffness + sparse.eye(size) * 1e-6
    weight = np.ones(len(target))
    for _ in range(6):
        weighted = matrix.T.multiply(weight)
        values = spsolve((weighted @ matrix + smooth).tocsc(), weighted @ target)
        weight = OUTLIER / np.maximum(np.abs(matrix @ values - target), OUTLIER / 3)
    return np.asarray(values)


def interpolation(axes: Sequence[np.ndarray], place: Sequence[np.ndarray]) -> Any:
    """The matrix that gives the interpolated values at the places from the values at the knots."""
    count = len(place[0])
    columns, weights = np.zeros((count, 1), dtype=np.int64), np.ones((count, 1))
    for axis, at in zip(axes, place, strict=True):
        columns = columns * len(axis)
        if len(axis) == 1:
            continue
        low = np.clip(np.searchsorted(axis, at, side="right") - 1, 0, len(axis) - 2)
        share = np.clip((at - axis[low]) / (axis[low + 1] - axis[low]), 0, 1)[:, None]
        columns = np.concatenate([columns + low[:, None], columns + low[:, None] + 1], axis=1)
        weights = np.concatenate([weights * (1 - share), weights * share], axis=1)
    rows = np.repeat(np.arange(count), columns.shape[1])
    size = int(np.prod([len(axis) for axis in axes]))
    return sparse.csr_matrix((weights.ravel(), (rows, columns.ravel())), shape=(count, size))


def second_differences(lengths: Sequence[int]) -> Any:
    size = int(np.prod(lengths))
    places = np.arange(size).reshape(lengths)
    triples = []
    for dimension, length in enumerate(lengths):
        if length >= 3:
            along = np.moveaxis(places, dimension, 0)
            triples.append(np.stack([along[:-2].ravel(), along[1:-1].ravel(), along[2:].ravel()], axis=1))
    if not triples:
        return sparse.csr_matrix((1, size))
    found = np.concatenate(triples)
    rows = np.repeat(np.arange(len(found)), 3)
    return sparse.csr_matrix((np.tile([1.0, -2.0, 1.0], len(found)), (rows, found.ravel())), shape=(len(found), size))


def files(folder: Path, pattern: str) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Engine, version and rows of the newest version of each engine's file."""
    newest: dict[str, Path] = {}
    for path in sorted(
        folder.glob(pattern),
        key=lambda path: [int(x) if x.isdigit() else 0 for x in path.parts[-2].replace("rc", ".").split(".")],
    ):
        newest[path.parts[-3]] = path
    for engine, path in newest.items():
        yield engine, path.parts[-2], pd.read_parquet(path)


def reference(gpu: str, kernel: Work) -> np.ndarray:
    facts = gpus()[gpu]
    return kernel.seconds(facts.peaks[kernel.peak], facts.memory_bandwidth)


def columns(frame: pd.DataFrame, *names: str) -> list[np.ndarray]:
    return [frame[name].to_numpy(dtype=float) for name in names]


GEMM_FORMATS = {
    "bfloat16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "nvfp4": "nvfp4",
    "sq": "int8",
    "int8_wo": "int8_weight",
    "int4_wo": "int4",
}


def gemms(folder: Path, gpu: str) -> Iterator[tuple[str, str, Points]]:
    for engine, version, frame in files(folder, "gemm/*/*/gemm_perf.parquet"):
        for name, rows in frame[(frame.n >= 128) & (frame.k >= 128)].groupby("gemm_dtype"):
            dtype = GEMM_FORMATS[name]
            rows = rows.groupby(
                ["m", "n", "k"], as_index=False
            ).latency.min()  # of several kernels the engine picks the best
            m, n, k = columns(rows, "m", "n", "k")
            kernel = work.gemm(m, n, k, dtype)
            shape = (n * 2**20 + k).astype(np.int64)
            arguments = {"m": m.astype(int), "n": n.astype(int), "k": k.astype(int)}
            seconds = rows.latency.to_numpy() * 1e-3
            yield (
                engine,
                version,
                Points("gemm", dtype, "gemm", kernel, reference(gpu, kernel), seconds, shape, arguments),
            )


OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}


def collectives(folder: Path, gpu: str) -> Iterator[tuple[str, str, Points]]:
    """NCCL, and each engine's all-reduce in a CUDA graph. Sizes are in elements of 2 bytes; every other size is held out."""
    found = list(files(folder, "comm/nccl/*/nccl_perf.parquet"))
    for engine, version, frame in found:
        for name, rows in frame[frame.nccl_dtype == "half"].groupby("op_name"):
            yield engine, version, collective_points(gpu, "nccl", OPERATIONS[name], rows)
    for engine, version, frame in files(folder, "comm/*/*/custom_allreduce_perf.parquet"):
        if "backend" in frame:
            frame = frame[frame.backend.str.endswith("_graph")]
        yield engine, version, collective_points(gpu, "custom", "all_reduce", frame)


def collective_points(gpu: str, kind: str, operation: str, frame: pd.DataFrame) -> Points:
    rows = frame.groupby(["num_gpus", "message_size"], as_index=False).latency.min()
    ranks, elements = columns(rows, "num_gpus", "message_size")
    size = 2 * elements
    facts = gpus()[gpu]
    kernel = Work(0.0, 0.0, "", (size, ranks))
    seconds = (
        work.collective_bytes(operation, size, ranks) / (facts.link_bandwidth or facts.pcie_bandwidth) + FIXED_SECONDS
    )
    odd = np.log2(size).astype(int) % 2 == 0  # knots are the odd powers of two
    shape = np.where(odd, HELD_OUT_CODE, FITTED_CODE)
    arguments = {"bytes": size.astype(int), "ranks": ranks.astype(int)}
    return Points(kind, operation, "collective", kernel, seconds, rows.latency.to_numpy() * 1e-3, shape, arguments)


# two codes that the checksum holds out and keeps
HELD_OUT_CODE = next(str(i) for i in range(100) if zlib.crc32(str(i).encode()) % 5 == 0)
FITTED_CODE = next(str(i) for i in range(100) if zlib.crc32(str(i).encode()) % 5 != 0)

FAMILIES: tuple[Callable[[Path, str], Iterator[tuple[str, str, Points]]], ...] = (gemms, collectives)

if __name__ == "__main__":
    main()
