"""`python -m measure trace MODEL`: the flags of `train`, answered by running the real step in a child process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calc.breakdown import Breakdown, Component, to_csv
from calc.catalogue import load_config
from calc.command_line.tables import aligned, formatted, markdown
from calc.commands import flag
from calc.errors import InputError
from calc.hardware import Gpu, chosen_gpu
from calc.model.config import LARGEST_CONFIG, from_config, parse_config
from calc.training import TrainingAnswer, train
from calc.training.device_totals import device_totals
from calc.training.overhead import SOURCES
from calc.training.plan import TrainingPlan
from calc.units import show_bytes
from measure.commands.tables import checked_format
from measure.trace import flags, progress_events
from measure.trace.child import observe
from measure.trace.options import TraceOptions
from measure.trace.paths import laid_side_by_side

_COLUMNS = ("path", "predicted", "traced", "error")


@dataclass(frozen=True, slots=True)
class Observed:
    """The JSON of a trace, as an answer that the command line can print in every format."""

    data: dict[str, Any]

    @property
    def breakdown(self) -> Breakdown:
        """The peak instant, one leaf a component."""
        return Breakdown(
            Component("", children=tuple(Component(row["path"], row["value"]) for row in self.data["components"])),
            "bytes",
        )

    def as_json(self) -> dict[str, Any]:
        return self.data


def main(argv: Sequence[str]) -> str:
    """The answer as text. InputError on bad input, on what a trace cannot run, and when it takes longer than --seconds."""
    given = vars(flags.parser().parse_args(argv))
    form = checked_format(given["format"], (flags.LINES,))
    plan = flags.plan_of(given)
    options = flags.options_of(plan, given)
    gpu = chosen_gpu(given["gpu"], given["gpu_memory_gib"], given["gpu_tflops"], given["gpu_GBps"], flag)
    seconds = flags.seconds_of(given["seconds"])
    config = _config(given)
    told = train(from_config(config, given["MODEL"]), plan, gpu) if given["compare"] else None
    idle = _idle_pools(config, given["MODEL"], plan) if plan.zero == 3 else 0

    def answer(progress: Callable[[str], None], stopped: Callable[[], bool]) -> dict[str, Any]:
        return _answer(observe(config, options, seconds, progress, stopped), plan, gpu, told, idle)

    if form == flags.LINES:
        return progress_events.tell(answer, seconds, given["attached"])
    if given["ledger"]:
        return ledger(observe(config, options, seconds), options)
    found = answer(lambda text: print(text, file=sys.stderr, flush=True), lambda: False)
    return _table(found, form) if told and form != "json" else formatted(Observed(found), form)


def _config(given: Mapping[str, Any]) -> dict[str, Any]:
    """The model's config. A page that is attached gives it as one line, and goes on to hold standard input."""
    if given["attached"] and given["MODEL"] == "-":
        return parse_config(sys.stdin.buffer.readline(LARGEST_CONFIG + 1))
    return load_config(given["MODEL"])


def _idle_pools(config: dict[str, Any], name: str, plan: TrainingPlan) -> int:
    """What FSDP2's streams hold idle, by the prediction: fake tensors have no streams. 0 for models that only a trace knows."""
    try:
        return train(from_config(config, name), plan).worst.idle_pools
    except InputError:
        return 0


def _answer(
    observed: Mapping[str, Any], plan: TrainingPlan, gpu: Gpu | None, told: TrainingAnswer | None, idle: int
) -> dict[str, Any]:
    """What was observed, completed, and with the prediction where there is one."""
    data = _completed(observed, plan, gpu, idle)
    if told is None:
        return data
    pairs = laid_side_by_side(told.breakdown, observed["alive"], told.spec)
    compared = [dict(zip(_COLUMNS, pair, strict=True)) for pair in pairs]
    return {**data, "predicted_peak_bytes": told.peak_bytes, "predicted_phases": told.phases, "compared": compared}


def _table(answer: Mapping[str, Any], form: str) -> str:
    """The comparison as text: the peak by path, what only one side has left open on the other."""
    if form == "csv":
        return to_csv(answer["compared"], _COLUMNS).rstrip("\n")
    cells = [
        (row["path"], _bytes(row["predicted"]), _bytes(row["traced"]), _percent(row["error"]))
        for row in answer["compared"]
    ]
    return markdown(_COLUMNS, cells) if form == "markdown" else aligned(cells, _COLUMNS)


def _bytes(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.2%}"


def _completed(observed: Mapping[str, Any], plan: TrainingPlan, gpu: Gpu | None, idle: int) -> dict[str, Any]:
    """What was observed, with what no tensor shows put on top by the same rules as for a prediction."""
    states = ("peak_bytes", "peak_phase", "parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes")
    stage = {"stage": 0, "layers": observed["layers"], "in_flight": 1, **{key: observed[key] for key in states}}
    return {
        **{key: value for key, value in observed.items() if key not in ("saved", "components", "assumptions", "alive")},
        **device_totals(plan, gpu, observed["peak_bytes"], idle=idle).as_json(),
        "gpus": plan.gpus,
        "stages": [stage],
        "saved": observed["saved"],
        "components": observed["components"],
        "assumptions": [*observed["assumptions"], *(f"not observed: {source}" for source in SOURCES.values())],
    }


def ledger(answer: Mapping[str, Any], options: TraceOptions) -> str:
    """The ledger as text: per layer, each kept storage with the operation that keeps it, in bytes and in bytes a token."""
    tokens = options.seq * options.micro_batch
    lines = []
    for layer in dict.fromkeys(row["layer"] for row in answer["saved"]):
        rows = [row for row in answer["saved"] if row["layer"] == layer]
        total = sum(row["nbytes"] for row in rows)
        where = "outside the layers" if layer is None else f"layer {layer} (stands for {rows[0]['count']})"
        lines.append(f"{where}: {total:,} bytes ({show_bytes(total)}), {total / tokens:,.2f} bytes a token")
        for row in rows:
            shape = "×".join(map(str, row["shape"])) or "scalar"
            keeper = f"{row['module'] or '(model)'} {row['op']}"
            cells = f"{keeper:<56} {row['dtype']:<9} {shape:<20} {row['nbytes']:>15,} {row['nbytes'] / tokens:>12,.2f}"
            lines.append(f"  {cells}  made by {row['made_by']}")
    return "\n".join(lines)
