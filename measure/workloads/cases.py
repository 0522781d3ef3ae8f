"""What workloads share: case after case, halved when memory runs out, and predicted against measured as rows."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from calc.breakdown import Breakdown, compare
from calc.errors import InputError
from calc.measurements.records import Measured
from measure.setting import Setting

_HALVINGS: Final = 3  # an eighth of a size that was chosen to fit is small everywhere
_NO_MEMORY: Final = ("can't allocate memory", "out of memory", "Cannot allocate memory")  # what torch and CUDA say


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that a workload measures. `measure(divisor)` yields its rows with the size divided by so much (1 at first);
    what the rows say of their case is added to the title."""

    title: str
    measure: Callable[[int], Iterable[Measured]]


def each(setting: Setting, cases: Sequence[Case]) -> Iterator[Measured]:
    """The rows of all cases, with progress. A case that runs out of memory is halved and measured again, and its rows say so."""
    for index, case in enumerate(cases):
        for halvings in range(_HALVINGS + 1):
            try:
                setting.tell(index / len(cases), _title(case.title, "", halvings))
                for row in case.measure(2**halvings):
                    yield row._replace(case=_title(case.title, row.case, halvings))
                break
            except Exception as error:
                if halvings == _HALVINGS or not is_out_of_memory(error):
                    raise
            _free()


def _title(title: str, more: str, halvings: int) -> str:
    note = f"1/{2**halvings} of the size (out of memory)" if halvings else ""
    return ", ".join(filter(None, (title, more, note)))


def is_out_of_memory(error: Exception) -> bool:
    """Whether the error says that memory ran out, on the host or on a GPU."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in _NO_MEMORY)


def _free() -> None:
    """Give back what the failed case held. Called outside `except`: the error's traceback keeps its tensors alive."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def paired(predicted: Breakdown, observed: Breakdown) -> Iterator[Measured]:
    """Two breakdowns as rows by path, the total of both last; what only one side has stays visible."""
    for pair in compare(predicted, observed):
        yield Measured("", pair.path, pair.predicted, pair.observed, predicted.unit)


def timed_size(setting: Setting) -> Setting:
    """The setting for what is timed: on a GPU never the small size, which its caches hold and its launches outlast."""
    return setting if setting.device.kind == "cpu" else replace(setting, size="medium")


def needs_gpu(setting: Setting, workload: str) -> None:
    """InputError that says why this cannot be measured here, unless it runs on a GPU."""
    if setting.device.kind == "cpu":
        from measure.devices import why_no_gpu

        reason = why_no_gpu() or "--device cpu was chosen"
        raise InputError(f"{workload}: not measurable here: it needs a GPU; {reason}")
