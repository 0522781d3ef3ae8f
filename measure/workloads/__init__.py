"""What can be measured: a plain table of workloads, each named with the formula that it tests.

To add one: a module beside this with `run(setting)` that yields `Measured` rows, and a line in WORKLOADS. Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from calc.records import Measured
from measure.devices import Device

SIZES: Final = ("small", "medium")


@dataclass(frozen=True, slots=True)
class Setting:
    """What a workload is run with. `tell(fraction, message)` reports progress: the fraction of the whole that is done, 0 to 1."""

    device: Device
    size: str
    tell: Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Workload:
    """A named measurement. `tests` says which formula it puts to the test, `needs` what it takes.

    `run` yields each row as soon as it is measured; every row that was yielded is kept, however the run ends.
    """

    name: str
    tests: str
    needs: str
    run: Callable[[Setting], Iterator[Measured]]


def _decoder_states(setting: Setting) -> Iterator[Measured]:
    from measure.workloads.decoder_states import run

    return run(setting)


def _copy_bandwidth(setting: Setting) -> Iterator[Measured]:
    from measure.workloads.copy_bandwidth import run

    return run(setting)


_TABLE = (
    Workload(
        "decoder-states",
        "ledger of bytes per parameter (fp32, amp, pure-bf16): states of a real decoder after two AdamW steps",
        "any device; 0.1 GB (small) or 3 GB (medium)",
        _decoder_states,
    ),
    Workload(
        "copy-bandwidth",
        "2·N·itemsize bytes moved by a copy over the data sheet's memory bandwidth: Triton's kernel beside torch's",
        "any device; 0.5 GB (small) or 4 GB (medium); Triton's kernel needs a GPU",
        _copy_bandwidth,
    ),
)
WORKLOADS: Final = {workload.name: workload for workload in _TABLE}
