"""Makes calc/data/kernel_times/ and tests/published/kernel_times.json from the measurements in a public package.

    pip download --no-deps aiconfigurator-core==0.12.0 && unzip aiconfigurator_core-0.12.0-*.whl -d unpacked
    pip install pandas pyarrow scipy
    python tests/published/distil_kernel_times.py unpacked/aiconfigurator_core

Each table of the package is fitted by a grid over its shape (calc.kernel_times.grids): least squares on the logarithm of measured
over reference time, where each measurement lies between its 2^D nearest knots; outliers weigh less, and a small penalty on bends
fills cells without measurements. A fifth of the shapes stays out of the fit; the error on them is written next to the table, and
a sample of them becomes the test's data. Times are kept as integers of 1/128 of a factor of two.
"""

from __future__ import annotations

import io
import json
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sparse
from scipy.sparse.linalg import LinearOperator, cg

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from calc.hardware import gpus  # noqa: E402
from calc.kernel_times import work  # noqa: E402
from calc.kernel_times.grids import Grid  # noqa: E402
from calc.kernel_times.tables import DATA, STEPS, longest, table  # noqa: E402
from calc.kernel_times.times import KernelTimes  # noqa: E402
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
SAMPLE = 3  # held-out shapes of each table that the test keeps
LARGEST_FIT = 20_000  # measurements, by chance, that one fit takes
BEND = 0.02  # what a bend of the grid costs
# the table with the most scatter has knots on both sides of the tiles' edges, all measurements and stiffer bends: its median error on
# held-out shapes is 5.0 % so, 5.7 % as the others are made
FITS: dict[str, tuple[int, float]] = {"gemm, finest": (40_000, 0.05)}
OUTLIER = 0.05  # a misfit (in log 2) from which a measurement weighs less


def powers(low: int, high: int, step: int = 1) -> list[float]:
    return [float(2**e) for e in range(low, high + 1, step)]


NO_WINDOW = float(2**20)
EDGES = [
    1,
    4,
    8,
    16,
    17,
    32,
    33,
    48,
    64,
    65,
    96,
    97,
    128,
    129,
    192,
    193,
    256,
    257,
    512,
    513,
    768,
    769,
    1024,
    1025,
    1536,
]
PLACES = [*powers(7, 10), 1536, 2048, 3072, 4096, 6144, 8192, 16384, 65536]
AXES: dict[str, dict[str, list[float]]] = {
    "gemm": {
        "m": [1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 32768],
        "n": [*powers(7, 14), 65536],
        "k": [*powers(7, 14), 65536],
    },
    "gemm, finer": {
        "m": [1, 4, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 32768],
        "n": PLACES,
        "k": [*powers(7, 14), 65536],
    },
    "gemm, finest": {
        "m": [*EDGES, 2048, 3072, 4096, 8192, 32768],
        "n": PLACES,
        "k": [*powers(7, 14), 65536],
    },
    "context attention": {
        "query": powers(4, 14),
        "batch x heads": powers(0, 10, 2),
        "heads a kv head": [1, 4, 16],
        "head_dim": [64, 128, 256],
        "window": [128, 1024, 8192, NO_WINDOW],
    },
    "decode attention": {
        "context": [16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072],
        "batch x kv heads": [1, 4, 8, 16, 32, 64, 128, 256, 512, 2048],
        "heads a kv head": [1, 4, 8, 16],
        "head_dim": [64, 128, 256],
        "window": [128, 1024, NO_WINDOW],
    },
    "latent context": {"query": powers(0, 14), "batch": powers(0, 8, 2), "heads": [1, 4, 16, 64, 128]},
    "latent decode": {"context": powers(0, 17), "batch": powers(0, 10), "heads": [1, 4, 16, 64, 128]},
    "experts": {
        "tokens": [1, 4, 16, 64, 256, 1024, 4096, 65536],
        "rows an expert": [1 / 64, 1 / 4, 1, 4, 16, 64, 256, 1024, 8192],
        "experts of a rank": [1, 8, 32, 256],
        "hidden x intermediate": [2.0**17, 2.0**20, 2.0**22, 2.0**24],
        "skew": [1, 4],
    },
    "delta rule": {
        "query": [1, 2, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 32768],
        "batch": powers(0, 10, 2),
        "v heads": [2, 8, 32, 64],
        "k heads": [1, 4, 16],
    },
    "element-wise": {"bytes": powers(8, 32)},
    "collective": {"bytes": powers(9, 30, 2), "ranks": [2, 4, 8]},
    "exchange": {"tokens": powers(0, 16), "hidden": [2048, 4096, 7168], "top_k": [1, 2, 4, 8, 22]},
}
# the second grid of the experts: what one model's shape adds to what shapes like it have
SHAPE_AXES = {"rows an expert": [1 / 16, 1, 16, 128, 1024, 8192], "experts of a rank": [1, 4, 16, 64, 256]}


COLUMNS = (
    "gpu",
    "kind",
    "dtype",
    "engine",
    "version",
    "axes",
    "median",
    "p90",
    "held_out",
    "fitted",
    "array",
    "shapes",
)


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
    model: np.ndarray | None = None  # of experts: the model's shape, [n, 4]: hidden, intermediate, experts, top_k


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
        save(DATA / f"{gpu}.npz", kept)
    shapes = sorted({tuple(shape) for row in tables for shape in row["shapes"]})
    for row in tables:
        row["shapes"] = [shapes.index(tuple(shape)) for shape in row["shapes"]]
    index = ABOUT | {
        "gpus": {gpu: reference_of(gpu) for gpu in arrays},
        "axes": AXES,
        "shape_axes": SHAPE_AXES,
        "shapes": shapes,
        "columns": list(COLUMNS),
        "rows": [[row[name] for name in COLUMNS] for row in tables],
    }
    write(DATA / "index.json", dict(index))
    write(Path(__file__).parent / "kernel_times.json", ABOUT | {"rows": sample})
    write(DATA / "index.json", index | {"relation": by_relation(sample), "roofline": by_roofline(sample)})


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """An .npz file, deflated as far as it goes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, values in arrays.items():
            buffer = io.BytesIO()
            np.save(buffer, values)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), buffer.getvalue(), zipfile.ZIP_DEFLATED, 9)


# GPUs whose measurements are asked of another's tables: siblings and neighbouring generations
RELATED = {
    "h100-sxm-80gb": "a100-sxm-80gb",
    "h200-141gb": "h100-sxm-80gb",
    "b200-180gb": "h200-141gb",
    "b300-288gb": "b200-180gb",
    "l40s-48gb": "a100-sxm-80gb",
    "rtx-pro-6000-server-96gb": "l40s-48gb",
}


def by_relation(sample: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Median and 90th percentile of the error, by kind, where a relative's table stands for the GPU's own."""

    def stand_in(row: dict[str, Any]) -> KernelTimes | None:
        other = RELATED.get(row["gpu"])
        if other is None or table(other, row["kind"], row["dtype"], None) is None:
            return None
        times = KernelTimes(gpus()[row["gpu"]])
        times._relatives = (other,)
        return times

    return errors(sample, stand_in)


def by_roofline(sample: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The same for the roofline, at full peaks and bandwidths."""
    return errors(sample, lambda row: KernelTimes(gpus()[row["gpu"]], "roofline"))


def errors(
    sample: list[dict[str, Any]], times_of: Callable[[dict[str, Any]], KernelTimes | None]
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in sample:
        times = times_of(row)
        if times is not None:
            found.setdefault(row["kind"], []).append(abs(answer(times, row) / row["seconds"] - 1))
    return {kind: [round(float(np.percentile(each, p)), 3) for p in (50, 90)] for kind, each in found.items()}


def answer(times: KernelTimes, row: dict[str, Any]) -> float:
    """What the product says of a measured row of the sample."""
    given = {name: row[name] for name in row if name not in ("gpu", "engine", "kind", "dtype", "seconds")}
    kind, dtype = row["kind"], row["dtype"]
    if kind in ("nccl", "custom"):
        return float(times.collective(dtype, given["bytes"], given["ranks"], kernel=kind))
    if kind.startswith("exchange_"):
        return float(times.expert_exchange(dtype, **given, ranks=8, mode=kind.removeprefix("exchange_")))
    if kind in ("linear_attention", "memory_bound"):
        return float(getattr(times, kind)(**given))
    if kind.endswith(("attention", "mla_context", "mla_decode")):
        return float(getattr(times, kind)(**given, kv_dtype=dtype))
    return float(getattr(times, kind)(**given, dtype=dtype))


def write(path: Path, value: dict[str, Any]) -> None:
    """JSON with one line an entry of the longest list, so that a change shows as one line."""
    rows = value.pop("rows")
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    path.write_text(json.dumps(value, indent=1)[:-2] + f',\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")


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
    return (row["gpu"], row["kind"], row["dtype"], quantises, row["median"])


def distil(
    gpu: str, engine: str, version: str, points: Points
) -> tuple[dict[str, Any], np.ndarray, list[dict[str, Any]]]:
    """The table's row of the index, its integers, and a sample of its held-out measurements."""
    axes = [np.log2(np.asarray(knots, dtype=float)) for knots in AXES[points.axes].values()]
    place = [np.broadcast_to(np.log2(np.maximum(x, 2.0**-30)), points.seconds.shape) for x in points.kernel.point]
    target = np.log2(points.seconds / points.reference)
    held = held_out(points.shape)
    values = integers(fit(axes, [x[~held] for x in place], target[~held], *FITS.get(points.axes, (LARGEST_FIT, BEND))))
    grid = Grid(tuple(axes), (values / STEPS).reshape([len(axis) for axis in axes]))
    factor = grid.factor([2.0**x for x in place])
    packed, shapes = packed_integers(values, axes), np.zeros((0, 4))
    if points.model is not None:
        shapes, which = np.unique(points.model, axis=0, return_inverse=True)
        narrow = [np.arange(len(shapes), dtype=float), *(np.log2(np.asarray(x)) for x in SHAPE_AXES.values())]
        where = [which.reshape(-1).astype(float), place[1], place[2]]
        residual = target - np.log2(factor)
        more = integers(fit(narrow, [x[~held] for x in where], residual[~held]))
        correction = Grid(tuple(narrow), (more / STEPS).reshape([len(axis) for axis in narrow]))
        factor = factor * correction.factor([2.0**x for x in where])
        packed = np.concatenate([packed, packed_integers(more, narrow)], axis=1)
    predicted = points.reference * factor
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
        "shapes": shapes.astype(int).tolist(),
    }
    seed = zlib.crc32(f"{gpu} {engine} {points.kind} {points.dtype}".encode())
    chosen = np.random.default_rng(seed).choice(np.flatnonzero(held), min(SAMPLE, held.sum()), replace=False)
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
    return row, packed, rows


def packed_integers(values: np.ndarray, axes: Sequence[np.ndarray]) -> np.ndarray:
    """Differences along the longest axis as two planes of bytes, which deflate well; `calc.kernel_times.tables` undoes it."""
    grid = values.astype(np.int64).reshape([len(axis) for axis in axes])
    steps = np.diff(grid, axis=longest(axes), prepend=0)
    folded = np.where(steps < 0, -2 * steps - 1, 2 * steps).ravel()
    return np.stack([folded & 255, folded >> 8]).astype(np.uint8)


def integers(values: np.ndarray) -> np.ndarray:
    return np.clip(np.round(values * STEPS), -32768, 32767).astype(np.int16)


def plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def held_out(shape: np.ndarray) -> np.ndarray:
    """A fifth of the shapes, by a checksum of each: the same ones in every run."""
    codes, inverse = np.unique(shape.astype(str), return_inverse=True)
    out = np.array([zlib.crc32(code.encode()) % 5 == 0 for code in codes])
    return out[inverse]


def fit(
    axes: Sequence[np.ndarray],
    place: Sequence[np.ndarray],
    target: np.ndarray,
    most: int = LARGEST_FIT,
    bend: float = BEND,
) -> np.ndarray:
    """The grid's values: iterated least squares of the multilinear interpolation, outliers weighed down."""
    if len(target) > most:
        chosen = np.random.default_rng(0).choice(len(target), most, replace=False)
        place, target = [x[chosen] for x in place], target[chosen]
    matrix, lengths = interpolation(axes, place), [len(axis) for axis in axes]
    bends, slopes = differences(lengths, (1.0, -2.0, 1.0)), differences(lengths, (1.0, -1.0))
    # a slope costs next to nothing: it only says that a cell without measurements is as its neighbours are
    smooth = (bends.T @ bends * bend + slopes.T @ slopes * 1e-4).tocsr()
    transposed, weight = matrix.T.tocsr(), np.ones(len(target))
    values = np.full(matrix.shape[1], float(np.median(target)))
    for _ in range(5):
        diagonal = transposed.multiply(transposed) @ weight + smooth.diagonal() + 1e-9
        system = LinearOperator(
            smooth.shape, lambda x, w=weight: transposed @ (w * (matrix @ x)) + smooth @ x, dtype=float
        )
        values, _ = cg(
            system, transposed @ (weight * target), values, rtol=1e-4, maxiter=300, M=sparse.diags(1 / diagonal)
        )
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


def differences(lengths: Sequence[int], stencil: tuple[float, ...]) -> Any:
    """The matrix of differences between neighbouring knots along every axis."""
    size, reach = int(np.prod(lengths)), len(stencil)
    places = np.arange(size).reshape(lengths)
    found = [np.zeros((0, reach), dtype=np.int64)]
    for dimension, length in enumerate(lengths):
        along = np.moveaxis(places, dimension, 0)
        if length >= reach:
            ends = [along[i : length - reach + 1 + i].ravel() for i in range(reach)]
            found.append(np.stack(ends, axis=1))
    every = np.concatenate(found)
    rows = np.repeat(np.arange(len(every)), reach)
    return sparse.csr_matrix((np.tile(stencil, len(every)), (rows, every.ravel())), shape=(len(every), size))


def files(folder: Path, pattern: str, *, largest: bool = False) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Engine, version and rows of each engine's newest file, or of its newest among the large ones (later files may hold few rows)."""
    newest: dict[str, Path] = {}
    for path in sorted(folder.glob(pattern), key=version_order):
        if not (largest and path.parts[-3] in newest and path.stat().st_size < 200_000):
            newest[path.parts[-3]] = path
    for engine, path in newest.items():
        yield engine, path.parts[-2], pd.read_parquet(path)


def version_order(path: Path) -> list[int]:
    return [int(part) if part.isdigit() else 0 for part in path.parts[-2].replace("rc", ".").split(".")]


def reference(gpu: str, kernel: Work) -> np.ndarray:
    facts = gpus()[gpu]
    return kernel.seconds(facts.peaks.get(kernel.peak, 1.0), facts.memory_bandwidth)


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
            if (engine, name) == ("vllm", "fp8_block"):
                continue  # eager launches of DeepGEMM: the host's time (55 to 280 us), not the kernel's
            dtype = GEMM_FORMATS[name]
            rows = rows.groupby(
                ["m", "n", "k"], as_index=False
            ).latency.min()  # of several kernels the engine picks the best
            m, n, k = columns(rows, "m", "n", "k")
            kernel = work.gemm(m, n, k, dtype)
            shape = (n * 2**20 + k).astype(np.int64)
            arguments = {"m": m.astype(int), "n": n.astype(int), "k": k.astype(int)}
            seconds = rows.latency.to_numpy() * 1e-3
            axes = "gemm" if dtype != "bf16" else "gemm, finest" if gpu == "l40s-48gb" else "gemm, finer"
            yield (
                *(engine, version),
                Points("gemm", dtype, axes, kernel, reference(gpu, kernel), seconds, shape, arguments),
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


def codes(*values: np.ndarray) -> np.ndarray:
    """One text a measurement: what must be held out together."""
    return np.array(["/".join(f"{x:g}" for x in row) for row in zip(*values, strict=True)])


def attentions(folder: Path, gpu: str) -> Iterator[tuple[str, str, Points]]:
    """Attention of prompts and of single tokens; whole head counts are held out."""
    for kind, pattern in (("context_attention", "context"), ("decode_attention", "generation")):
        for engine, version, frame in files(folder, f"attention/*/*/{pattern}_attention_perf.parquet"):
            if "window_size" not in frame:
                frame["window_size"] = 0
            frame = frame[
                frame.head_dim.isin([64, 128, 256]) & (frame.isl + frame.step >= (2 if pattern == "context" else 16))
            ]
            for dtype, name in (("bf16", "bfloat16"), ("fp8", "fp8")):
                rows = frame[frame.kv_cache_dtype == name]
                if len(rows):
                    rows = rows[
                        rows.attn_dtype == rows.attn_dtype.mode()[0]
                    ]  # 8-bit products too, where the engine has them
                    yield engine, version, attention_points(kind, dtype, gpu, rows)


def attention_points(kind: str, dtype: str, gpu: str, frame: pd.DataFrame) -> Points:
    keys = ["batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim", "window_size"]
    rows = frame.groupby(keys, as_index=False).latency.min()
    batch, query, step, heads, kv_heads, head_dim, window = columns(rows, *keys)
    given = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "window": window}
    if kind == "context_attention":
        kernel = work.context_attention(batch, query, 0, heads, kv_heads, head_dim, window, dtype, causal=True)
        given |= {"query": query}
    else:
        kernel = work.decode_attention(batch, query + step, heads, kv_heads, head_dim, window, dtype)
        given |= {"context": query + step}
    arguments = {name: value.astype(int) for name, value in given.items()}
    axes = kind.replace("_", " ")
    seconds = rows.latency.to_numpy() * 1e-3
    return Points(kind, dtype, axes, kernel, reference(gpu, kernel), seconds, codes(heads, kv_heads), arguments)


def latent_attentions(folder: Path, gpu: str) -> Iterator[tuple[str, str, Points]]:
    """The core of multi-head latent attention with DeepSeek-V3's head sizes; whole pairs of batch and heads are held out."""
    for kind, pattern in (("mla_context", "context"), ("mla_decode", "generation")):
        for engine, version, frame in files(folder, f"mla/*/*/{pattern}_mla_perf.parquet"):
            for dtype, name in (("bf16", "bfloat16"), ("fp8", "fp8")):
                keys = ["batch_size", "isl", "step", "num_heads"]
                rows = frame[frame.kv_cache_dtype == name].groupby(keys, as_index=False).latency.min()
                if not len(rows):
                    continue
                batch, query, step, heads = columns(rows, *keys)
                if kind == "mla_context":
                    kernel, given = work.mla_context(batch, query, 0, heads, 192, 128), {"query": query}
                else:
                    kernel, given = (
                        work.mla_decode(batch, query + step, heads, 512, 64, dtype),
                        {"context": query + step},
                    )
                arguments = {k: v.astype(int) for k, v in ({"batch": batch, "heads": heads} | given).items()}
                axes = "latent context" if kind == "mla_context" else "latent decode"
                seconds = rows.latency.to_numpy() * 1e-3
                yield (
                    *(engine, version),
                    Points(kind, dtype, axes, kernel, reference(gpu, kernel), seconds, codes(batch, heads), arguments),
                )


EXPERT_FORMATS = {
    "bfloat16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "nvfp4": "nvfp4",
    "w4a16_mxfp4": "mxfp4",
    "w4a8_mxfp4_mxfp8": "mxfp4_mxfp8",
    "int4_wo": "int4",
}
SKEW_NAMES = {"balanced": "balanced", "power_law_1.01": "power_law", "power_law_1.2": "power_law_1.2"}
# Nemotron's experts have no gate: hidden, intermediate of its sizes
UNGATED = {(2688, 1856), (1024, 2688), (2048, 5120), (4096, 2688)}


def expert_groups(folder: Path, gpu: str) -> Iterator[tuple[str, str, Points]]:
    """Grouped GEMMs of experts; a model's shape under one split over ranks is held out as a whole."""
    for engine, version, frame in files(folder, "moe/*/*/moe_perf.parquet", largest=True):
        frame = frame[frame.distribution.isin(SKEW_NAMES)]
        for name, rows in frame.groupby("moe_dtype"):
            untuned = engine == "vllm" and name == "fp8" and folder.name in ("h100_sxm", "h200_sxm")
            if name in EXPERT_FORMATS and len(rows) >= 900 and not untuned:
                yield engine, version, expert_points(EXPERT_FORMATS[name], gpu, rows)


def expert_points(dtype: str, gpu: str, frame: pd.DataFrame) -> Points:
    keys = ["num_tokens", "hidden_size", "inter_size", "num_experts", "topk", "moe_tp_size", "moe_ep_size"]
    rows = frame.groupby([*keys, "distribution"], as_index=False).latency.min()
    tokens, hidden, intermediate, number, top_k, tp, ep = columns(rows, *keys)
    gated = np.array([(h, i) not in UNGATED for h, i in zip(hidden, intermediate, strict=True)])
    skew = rows.distribution.map(SKEW_NAMES).to_numpy()
    sizes = (tokens, hidden, intermediate, number, top_k, ep, tp, dtype)
    both = [work.experts(*sizes, gated=each) for each in (True, False)]
    coordinate = np.array([work.SKEWS[name] for name in skew])
    kernel = Work(0.0, 0.0, both[0].peak, (*both[0].point[:4], coordinate))
    seconds = np.where(gated, reference(gpu, both[0]), reference(gpu, both[1]))
    given = {
        "tokens": tokens,
        "hidden": hidden,
        "intermediate": intermediate,
        "num_experts": number,
        "top_k": top_k,
        "tp": tp,
        "ep": ep,
    }
    arguments = {k: v.astype(int) for k, v in given.items()} | {"skew": skew, "gated": gated}
    model = np.stack([hidden, intermediate, number, top_k], axis=1)
    shape = codes(hidden, intermediate, number, top_k, tp, ep)
    return Points("experts", dtype, "experts", kernel, seconds, rows.latency.to_numpy() * 1e-3, shape, arguments, model)


def delta_rules(folder: Path, gpu: str) -> Iterator[tuple[str, str, Points]]:
    """Gated delta rule with its convolution, of Qwen3.5's head sizes; whole pairs of head counts and batch are held out."""
    for engine, version, frame in files(folder, "linear_attention/*/*/gdn_perf.parquet"):
        keys = ["phase", "batch_size", "seq_len", "num_k_heads", "num_v_heads"]
        parts = frame.groupby([*keys, "kernel_source"], as_index=False).latency.min()
        parts["convolution"] = parts.kernel_source.str.startswith("causal_conv1d")
        best = parts.groupby([*keys, "convolution"], as_index=False).latency.min()
        rows = best.groupby(keys, as_index=False).latency.agg(["sum", "count"])
        rows = rows[(rows["count"] == 2) & ((rows.phase == "generation") | (rows.seq_len > 1))]
        batch, query, k_heads, v_heads = columns(rows, "batch_size", "seq_len", "num_k_heads", "num_v_heads")
        kernel = work.gated_delta_rule(batch, query, k_heads, v_heads, 128, 128)
        given = {"batch": batch, "query": query, "k_heads": k_heads, "v_heads": v_heads}
        arguments = {k: v.astype(int) for k, v in given.items()}
        shape, seconds = codes(batch, k_heads, v_heads), rows["sum"].to_numpy() * 1e-3
        yield (
            *(engine, version),
            Points("linear_attention", "bf16", "delta rule", kernel, reference(gpu, kernel), seconds, shape, arguments),
        )


def element_wise(folder: Path, gpu: str) -> Iterator[tuple[str, str, Points]]:
    """A kernel that only moves bytes: bf16 to fp8 with a given scale (3 bytes an element), the plainest that was measured."""
    for engine, version, frame in files(folder, "quantize/vllm/*/scale_matrix_perf.parquet"):
        m, k = columns(frame, "m", "k")
        kernel, seconds = work.element_wise(3 * m * k), frame.latency.to_numpy() * 1e-3
        arguments = {"read_bytes": (2 * m * k).astype(int), "write_bytes": (m * k).astype(int)}
        yield (
            *(engine, version),
            Points(
                "memory_bound", "bf16", "element-wise", kernel, reference(gpu, kernel), seconds, codes(m, k), arguments
            ),
        )


def exchanges(folder: Path, gpu: str) -> Iterator[tuple[str, str, Points]]:
    """DeepEP's all-to-alls within 8 GPUs (times in microseconds); whole pairs of hidden size and top_k are held out."""
    found = {
        "low_latency": ("ll", "combine_avg_t_us", "dispatch_avg_t_us"),
        "normal": ("normal", "combine_transmit_us", "dispatch_transmit_us"),
    }
    for mode, (name, *times) in found.items():
        for engine, version, frame in files(folder, f"comm/*/*/wideep_deepep_{name}_perf.parquet"):
            for column in times:
                phase = column.split("_")[0]
                keys = ["num_token", "hidden_size", "num_topk"]
                rows = frame.groupby(keys, as_index=False)[
                    column
                ].min()  # over the numbers of multiprocessors given to it
                tokens, hidden, top_k = columns(rows, *keys)
                sent = work.expert_exchange_bytes(phase, tokens, hidden, top_k, 8)
                facts = gpus()[gpu]
                base = sent / (facts.link_bandwidth or facts.pcie_bandwidth) + FIXED_SECONDS
                given = {"tokens": tokens, "hidden": hidden, "top_k": top_k}
                arguments = {k: v.astype(int) for k, v in given.items()}
                kernel, seconds = Work(0.0, 0.0, "", (tokens, hidden, top_k)), rows[column].to_numpy() * 1e-6
                points = Points(
                    f"exchange_{mode}", phase, "exchange", kernel, base, seconds, codes(tokens, hidden), arguments
                )
                yield engine, version, points


FAMILIES: tuple[Callable[[Path, str], Iterator[tuple[str, str, Points]]], ...] = (
    *(gemms, attentions, latent_attentions, expert_groups, delta_rules, element_wise, collectives, exchanges),
)

if __name__ == "__main__":
    main()
