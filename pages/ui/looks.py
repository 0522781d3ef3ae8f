"""How fields look where their type does not say it: labels with units, the stops of sliders, choices."""

from __future__ import annotations

from dataclasses import dataclass

from calc.catalogue import catalogue
from calc.hardware import gpus
from calc.pipeline import SCHEDULES

CUSTOM = "custom"  # a model whose config the user gives; a GPU described by its figures alone


@dataclass(frozen=True, slots=True)
class Look:
    """A field's label, the stops of its slider (none: no slider), its choices where the plan takes any text, its step."""

    label: str = ""
    stops: tuple[int, ...] = ()
    choices: tuple[str, ...] = ()
    step: float = 0


def _doubling(low: int, high: int) -> tuple[int, ...]:
    """Powers of two and the halves between them, low to high: small steps where numbers are small."""
    powers = [low << place for place in range((high // low).bit_length())]
    return tuple(sorted({stop for power in powers for stop in (power, power * 3 // 2) if stop <= high}))


_SEQUENCE = _doubling(128, 2**20)

LOOKS = {
    "model": Look("Model", choices=(*catalogue(), CUSTOM)),
    "gpu": Look("GPU", choices=(*gpus(), CUSTOM)),
    "gpu_memory_gib": Look("Memory (GiB)", step=1),
    "gpu_tflops": Look("Peak (TFLOP/s)", step=10),
    "gpu_GBps": Look("Memory bandwidth (GB/s)", step=10),
    "compare": Look("Compare with a second scenario"),
    "units": Look("Bytes in"),
    "seq": Look("Sequence length (tokens)", _SEQUENCE),
    "context": Look("Context (tokens)", _SEQUENCE),
    "micro_batch": Look("Micro-batch (sequences)", _doubling(1, 256)),
    "concurrency": Look("Sequences at once", _doubling(1, 1024)),
    "stages": Look("Stages (ranks)", tuple(range(1, 33))),
    "microbatches": Look("Micro-batches", _doubling(1, 256)),
    "schedule": Look("Schedule", choices=tuple(SCHEDULES)),
}
