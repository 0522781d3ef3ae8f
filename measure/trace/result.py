"""What a trace answers: bytes by state and phase, the peak's parts, and the ledger of what each layer keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from calc.breakdown import Breakdown, Component
from measure.trace.model import Stack
from measure.trace.recorder import Storage
from measure.trace.timeline import STATES, Key, Peak, path_of


@dataclass(frozen=True, slots=True)
class SavedRow:
    """One storage kept from forward to backward, in a decoder layer (`layer`, for `count` layers alike) or outside the stack (None).

    `module` and `op` are those that save it (that made it, where autograd did not save it); `made_by` made it.
    """

    layer: int | None
    count: int
    module: str
    op: str
    made_by: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class TraceResult:
    """The observed bytes of one step on one device. `phases` has `forward`, `backward` and `step`; `alive` is the peak instant.

    `witness` names the program that was run.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    phases: Mapping[str, int]
    alive: Mapping[Key, int]
    saved: tuple[SavedRow, ...]
    layers: int
    layers_run: int
    witness: str
    assumptions: tuple[str, ...] = field(default=())

    @property
    def peak_phase(self) -> str:
        """The phase of the highest point."""
        return max(self.phases, key=lambda phase: self.phases[phase])

    @property
    def peak_bytes(self) -> int:
        """The highest point of the step."""
        return self.phases[self.peak_phase]

    def breakdown(self) -> Breakdown:
        """The peak instant as a breakdown in bytes: `parameters/...`, `gradients/...`, `activations/layers/...`."""
        return Breakdown(_tree("", self.alive), "bytes")

    def per_layer_bytes(self, layer: int) -> int:
        """Bytes that one decoder layer (by its number among those run) keeps at the end of forward."""
        return sum(row.nbytes for row in self.saved if row.layer == layer)

    def as_dict(self) -> dict[str, Any]:
        """The observed part of the command line's JSON, with the keys of a prediction."""
        return {
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.peak_phase,
            "phases": dict(self.phases),
            "parameters_bytes": self.parameters_bytes,
            "gradients_bytes": self.gradients_bytes,
            "optimizer_bytes": self.optimizer_bytes,
            "activations_bytes": self.activations_bytes,
            "layers": self.layers,
            "layers_run": self.layers_run,
            "saved": [_row(row) for row in self.saved],
            "components": [{**row, "source": self.witness} for row in self.breakdown().components()],
            "alive": [{**key._asdict(), "value": nbytes} for key, nbytes in self.alive.items()],
            "assumptions": list(self.assumptions),
        }


def _row(row: SavedRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in SavedRow.__dataclass_fields__}


def _tree(name: str, alive: Mapping[Key, int]) -> Component:
    """Category over path: one leaf for each, and one for all that is smaller than the table needs."""
    nested: dict[str, Counter[str]] = {}
    for key, nbytes in alive.items():
        nested.setdefault(key.category, Counter())[key.path] += nbytes
    return Component(name, children=tuple(_category(category, paths) for category, paths in nested.items()))


def _category(name: str, paths: Mapping[str, int]) -> Component:
    leaves = tuple(Component(path or "other", nbytes) for path, nbytes in sorted(paths.items()))
    return Component(name, children=leaves)


def saved_rows(storages: Iterable[Storage], stack: Stack) -> tuple[SavedRow, ...]:
    """The ledger: what is kept beyond the states at the end of forward, layer by layer, then outside the stack."""
    counts = Counter(stack.stands_for)
    rows = []
    for storage in storages:
        if storage.category in (*STATES, "host"):
            continue
        saver = storage.saved_by.site if storage.saved_by else storage.site
        layer = storage.site.layer
        made_by = path_of(storage.site, storage.op) or storage.category
        op = storage.saved_by.op if storage.saved_by else storage.op
        rows.append(
            SavedRow(
                layer,
                counts[layer] if layer is not None else 1,
                saver.module,
                op,
                made_by,
                str(storage.dtype).removeprefix("torch."),
                storage.shape,
                storage.nbytes,
            )
        )
    return tuple(sorted(rows, key=lambda row: (row.layer is None, row.layer or 0)))


def by_phase(peaks: Mapping[str, Peak]) -> dict[str, Peak]:
    """The highest of each phase, all micro-batches together."""
    best: dict[str, Peak] = {}
    for name, peak in peaks.items():
        phase = name.partition(" ")[0]
        if phase not in best or peak.nbytes > best[phase].nbytes:
            best[phase] = peak
    return best
