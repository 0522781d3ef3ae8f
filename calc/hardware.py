"""The hardware catalogue: what each GPU holds, how fast it computes and moves bytes, and where each figure is from.

The facts are in data/gpus.json, with the unit in the key; they are converted here, once. None means unknown, not zero.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from calc.errors import InputError
from calc.units import GB, GiB, MiB

DATA = Path(__file__).parent / "data" / "gpus.json"

# where a row may state the memory that the driver shows, best first, and the bytes of one unit
_VISIBLE = (("memory_visible_bytes", 1), ("memory_visible_MiB", MiB), ("memory_visible_GiB", GiB))

# number format, the first compute capability whose tensor cores take it (CUDA Programming Guide, compute capabilities)
_NEEDS = {"fp16": (7, 0), "int8": (7, 5), "bf16": (8, 0), "tf32": (8, 0), "fp8": (8, 9), "fp4": (10, 0)}

# the formats that have a peak, and those that run at the rate of another
PEAK_KINDS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")
_SAME_RATE = {"fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}

# what a user may set by hand: field, lowest, highest allowed; the highest are far above any single device of today
_LIMITS = {"gpu_memory_gib": (0.001, 1_000_000.0), "gpu_tflops": (0.001, 1e9), "gpu_GBps": (0.001, 1e9)}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device as a program sees it (a module of two devices has a row for one of them).

    Bytes, FLOP/s, bytes/s and watts. Peaks are dense; links and PCIe are one way, per device. `memory_bytes` is the
    driver's figure, or a lower estimate when `memory_is_estimate`; `memory_note` says which and from where.
    `matrix_precisions` is None when nobody says which formats the matrix units take.
    """

    name: str
    title: str
    vendor: str
    architecture: str
    target: str | None  # the compiler's name on AMD (gfx942)
    compute_capability: str | None  # NVIDIA only
    matrix_precisions: tuple[str, ...] | None
    marketed_bytes: int | None
    memory_bytes: int | None
    memory_is_estimate: bool
    memory_note: str
    memory_bandwidth: float | None
    link_bandwidth: float | None
    pcie_bandwidth: float | None
    board_power: float | None
    confidence: str
    sources: tuple[str, ...]
    notes: str
    peaks: Mapping[str, float] = field(default_factory=dict, hash=False)

    def peak_flops(self, dtype: str) -> float | None:
        """The dense peak in FLOP/s for that number format (fp32 is without matrix units on NVIDIA); None if unknown."""
        return self.peaks.get(_SAME_RATE.get(dtype, dtype))

    def lacks(self, dtype: str) -> str | None:
        """Why the matrix units cannot take that format, in a few words; None when they can, or when nobody says."""
        kind = _SAME_RATE.get(dtype, dtype)
        needed = _NEEDS.get(kind)
        if needed and self.compute_capability:
            major, minor = self.compute_capability.split(".")
            if (int(major), int(minor)) < needed:
                at_least = f"{needed[0]}.{needed[1]}"
                return f"{kind} needs compute capability {at_least}; {self.name} has {self.compute_capability}"
        elif needed and self.matrix_precisions is not None and kind not in self.matrix_precisions:
            return f"{self.name} has no matrix unit for {kind}; it takes {', '.join(self.matrix_precisions)}"
        return None

    def why_no_peak(self, dtype: str) -> str:
        """The sentence to show where `peak_flops(dtype)` is None."""
        return self.lacks(dtype) or f"no source gives the dense {dtype} peak of {self.name}"

    def facts(self) -> dict[str, Any]:
        """The row as JSON: what `python -m calc gpus` prints."""
        return {
            "name": self.name,
            "title": self.title,
            "vendor": self.vendor,
            "architecture": self.architecture,
            "target": self.target,
            "compute_capability": self.compute_capability,
            "matrix_precisions": None if self.matrix_precisions is None else list(self.matrix_precisions),
            "marketed_bytes": self.marketed_bytes,
            "memory_bytes": self.memory_bytes,
            "memory_is_estimate": self.memory_is_estimate,
            "memory_note": self.memory_note,
            "peak_flops": dict(self.peaks),
            "memory_bandwidth_bytes_per_s": self.memory_bandwidth,
            "link_bandwidth_bytes_per_s": self.link_bandwidth,
            "pcie_bandwidth_bytes_per_s": self.pcie_bandwidth,
            "board_power_w": self.board_power,
            "confidence": self.confidence,
            "sources": list(self.sources),
            "notes": self.notes,
        }


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _memory(row: Mapping[str, Any]) -> tuple[int, bool]:
    """Bytes, and whether they are an estimate: without a driver's figure, the marketed GB are 10**9 bytes each."""
    for key, unit in _VISIBLE:
        if key in row:
            return int(row[key] * unit), bool(row.get("memory_is_estimate", False))
    return row["memory_GB"] * GB, True


def _gpu(row: Mapping[str, Any], architecture: Mapping[str, Any]) -> Gpu:
    memory, is_estimate = _memory(row)
    precisions = architecture["matrix_precisions"]
    return Gpu(
        name=row["name"],
        title=row["title"],
        vendor=row["vendor"],
        architecture=row["architecture"],
        target=architecture["target"],
        compute_capability=row["compute_capability"],
        matrix_precisions=None if precisions is None else tuple(precisions),
        marketed_bytes=row["memory_GB"] * GB,
        memory_bytes=memory,
        memory_is_estimate=is_estimate,
        memory_note=row["memory_note"],
        memory_bandwidth=_scaled(row["memory_bandwidth_GBps"], 1e9),
        link_bandwidth=_scaled(row["link_GBps"], 1e9),
        pcie_bandwidth=_scaled(row["pcie_GBps"], 1e9),
        board_power=row["board_power_W"],
        confidence=row["confidence"],
        sources=tuple(row["sources"]),
        notes=row["notes"],
        peaks={kind: value * 1e12 for kind, value in row["dense_peak_TFLOPS"].items() if value is not None},
    )


@cache
def gpus() -> dict[str, Gpu]:
    """Every GPU of the catalogue by name, in the order of the file."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    return {row["name"]: _gpu(row, data["architectures"][row["architecture"]]) for row in data["gpus"]}


def gpu(name: str, field: str = "gpu") -> Gpu:
    """The GPU of that name. InputError with the nearest names when there is none; `field` is what the user set."""
    known = gpus()
    found = known.get(name.strip().lower())
    if found:
        return found
    near = [each.name for each in find_gpus(name)[:3]] or difflib.get_close_matches(
        name.lower(), known, n=3, cutoff=0.5
    )
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise InputError.of(field, name, f"{hint}the command `python -m calc gpus` lists the {len(known)} known GPUs")


def find_gpus(text: str = "") -> list[Gpu]:
    """The GPUs whose name, title, vendor or architecture holds every word of the text, in any case."""
    words = text.lower().split()
    return [
        each
        for each in gpus().values()
        if all(
            word in f"{each.name} {each.title} {each.vendor} {each.architecture} {each.target}".lower()
            for word in words
        )
    ]


_UNLISTED = Gpu(
    name="custom",
    title="A GPU described by hand",
    vendor="",
    architecture="",
    target=None,
    compute_capability=None,
    matrix_precisions=None,
    marketed_bytes=None,
    memory_bytes=None,
    memory_is_estimate=False,
    memory_note="not given",
    memory_bandwidth=None,
    link_bandwidth=None,
    pcie_bandwidth=None,
    board_power=None,
    confidence="given",
    sources=("given by the user",),
    notes="",
)


def custom_gpu(
    memory_gib: float | None = None,
    tflops: float | None = None,
    GBps: float | None = None,
    base: Gpu | None = None,
    rename: Callable[[str], str] = lambda name: name,
) -> Gpu:
    """A GPU that is not listed, or a listed one (`base`) with figures of the user's own.

    `tflops` is the dense peak of every format that the device takes. InputError names the field (`gpu_memory_gib`,
    `gpu_tflops`, `gpu_GBps`, as turned by `rename` into what the user typed) when a figure is not a plausible number.
    """
    start = base or _UNLISTED
    given = {"gpu_memory_gib": memory_gib, "gpu_tflops": tflops, "gpu_GBps": GBps}
    for name, value in given.items():
        _check(name, value, rename)
    changes: dict[str, Any] = {}
    if memory_gib is not None:
        changes |= {
            "memory_bytes": int(memory_gib * GiB),
            "memory_is_estimate": False,
            "memory_note": "given by the user",
        }
    if tflops is not None:
        changes["peaks"] = {kind: tflops * 1e12 for kind in PEAK_KINDS if not start.lacks(kind)}
    if GBps is not None:
        changes["memory_bandwidth"] = GBps * 1e9
    if changes and base:
        changes["sources"] = (
            *base.sources,
            "given by the user: " + ", ".join(k for k, v in given.items() if v is not None),
        )
    return replace(start, **changes)


def _check(name: str, value: float | None, rename: Callable[[str], str]) -> None:
    low, high = _LIMITS[name]
    if value is not None and not (math.isfinite(value) and low <= value <= high):
        raise InputError.of(rename(name), value, f"it must be a number from {low:g} to {high:,.0f}")


def chosen_gpu(
    name: str | None,
    memory_gib: float | None = None,
    tflops: float | None = None,
    GBps: float | None = None,
    rename: Callable[[str], str] = lambda name: name,
) -> Gpu | None:
    """The GPU that a scenario asks for: by name, by figures, or by both (the figures win). None when it names none."""
    base = gpu(name, rename("gpu")) if name else None
    if memory_gib is None and tflops is None and GBps is None:
        return base
    return custom_gpu(memory_gib, tflops, GBps, base, rename)
