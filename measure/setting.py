"""What a workload is run with, on one device or by several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from calc.measurements.records import Measured
from measure.devices import Device

SIZES: Final = ("small", "medium")


@dataclass(frozen=True, slots=True)
class Setting:
    """What a workload is run with. `tell(fraction, message)` reports progress: the fraction of the whole that is done, 0 to 1.

    `model` is the MODEL that was asked for; "" leaves it to the workload. `ranks`: processes of a workload that takes several, 0 for
    its own number.
    """

    device: Device
    size: str
    tell: Callable[[float, str], None]
    model: str = ""
    ranks: int = 0


Run = Callable[[Setting], Iterator[Measured]]
