"""What was recorded of a program, as an answer: peak, phases, parts, modules, timeline, where memory runs out, what would help."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from calc.hardware import Gpu
from calc.training.device_totals import DeviceTotals, device_totals
from calc.training.plan import TrainingPlan
from measure.script.lines import Line
from measure.script.session import Session
from measure.trace.recorder import Event, Storage

_LARGEST_TIMELINE = 20_000  # points; beyond it only each highest point of a stretch is told
_FROM_LAYERS = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def totals(gpu: Gpu | None, ranks: int, peak: int) -> DeviceTotals:
    """The peak with context, NCCL, workspace and fragmentation on top, by the rules of a prediction."""
    return device_totals(TrainingPlan(dp=ranks), gpu, peak)


def limit_of(gpu: Gpu | None, ranks: int) -> int | None:
    """Bytes that a program's tensors may come to before the GPU is full; None without a GPU."""
    if gpu is None or gpu.memory_bytes is None:
        return None
    over = totals(gpu, ranks, 0).overhead
    share = totals(gpu, ranks, 2**40).overhead.fragmentation / 2**40
    return int((gpu.memory_bytes - over.context - over.nccl - over.workspace) / (1 + share))


def answer_of(session: Session, gpu: Gpu | None, ranks: int) -> dict[str, Any]:
    """The answer as JSON. `components` describes the peak, and its leaves sum to `peak_bytes`."""
    recorder = session.recorder
    events, lines = recorder.events, recorder.lines
    course = _course(events)
    top = max(range(len(course)), key=course.__getitem__, default=-1)
    alive = _alive(events[: top + 1])
    phases = _phases(events, course)
    found: dict[str, Any] = {
        "peak_bytes": recorder.peak,
        "peak_phase": events[top].site.phase if events else None,
        "peak_line": _line(lines[top]) if events else None,
        "phases": phases,
        **totals(gpu, ranks, recorder.peak).as_json(),
        "steps": session.done,
        "ranks": ranks,
        "parts": _by(alive, lambda each: part_of(each)),
        "modules": _by(alive, lambda each: _FROM_LAYERS.sub("*", _site(each).module) or "(outside modules)"),
        "lines": _by_line(events, lines, top),
        "components": [{"path": path, "value": value, "unit": "bytes"} for path, value in _paths(alive).items()],
        "out_of_memory": _out_of_memory(session, course),
        "timeline": _timeline(events, course, lines),
        "notes": [{"text": text, "line": _line(line)} for text, line in session.notes.items()],
    }
    found["suggestions"] = suggestions(found, alive)
    return found


def part_of(storage: Storage) -> str:
    """What a storage is, in one word."""
    if storage.category:
        return storage.category
    return "activations" if storage.saved_by is not None and storage.site.phase == "forward" else "temporaries"


def _site(storage: Storage) -> Any:
    return storage.saved_by.site if storage.saved_by is not None else storage.site


def _course(events: Sequence[Event]) -> list[int]:
    """Bytes after each event."""
    now, course = 0, []
    for event in events:
        now += event.sign * event.storage.nbytes
        course.append(now)
    return course


def _alive(events: Sequence[Event]) -> list[Storage]:
    known: dict[int, Storage] = {}
    for event in events:
        if event.sign > 0:
            known[id(event.storage)] = event.storage
        else:
            known.pop(id(event.storage), None)
    return list(known.values())


def _phases(events: Sequence[Event], course: Sequence[int]) -> dict[str, int]:
    """The highest point of each phase; a phase starts with what the one before it left."""
    highest: dict[str, int] = {}
    before, known = 0, ""
    for event, now in zip(events, course, strict=True):
        phase = event.site.phase
        start = before if phase != known else 0
        highest[phase] = max(highest.get(phase, 0), start, now)
        before, known = now, phase
    return highest


def _by(alive: Sequence[Storage], name: Any) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for each in alive:
        sums[name(each)] += each.nbytes
    return dict(sums.most_common())


def _paths(alive: Sequence[Storage]) -> dict[str, int]:
    return _by(alive, lambda each: "/".join(filter(None, (part_of(each), _FROM_LAYERS.sub("*", _site(each).module)))))


def _by_line(events: Sequence[Event], lines: Sequence[Line], top: int) -> list[dict[str, Any]]:
    """The bytes alive at the peak by the user's line that made them."""
    known: dict[int, tuple[Line, int]] = {}
    for event, line in zip(events[: top + 1], lines[: top + 1], strict=True):
        if event.sign > 0:
            known[id(event.storage)] = (line, event.storage.nbytes)
        else:
            known.pop(id(event.storage), None)
    sums: Counter[Line] = Counter()
    for line, nbytes in known.values():
        sums[line] += nbytes
    return [{**_line(line), "bytes": nbytes} for line, nbytes in sums.most_common(10)]


def _line(line: Line) -> dict[str, Any]:
    return {"file": line.file, "line": line.number, "text": line.text if line.file else ""}


def _out_of_memory(session: Session, course: Sequence[int]) -> dict[str, Any] | None:
    recorder = session.recorder
    if recorder.crossed is None:
        return None
    event = recorder.events[recorder.crossed]
    return {
        **_line(recorder.lines[recorder.crossed]),
        "phase": event.site.phase,
        "module": event.site.module,
        "operation": event.storage.op,
        "asked_bytes": event.storage.nbytes,
        "held_bytes": course[recorder.crossed] - event.storage.nbytes,
        "limit_bytes": recorder.limit,
    }


def _timeline(events: Sequence[Event], course: Sequence[int], lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Bytes after every event; of a long program the highest of each stretch of events."""
    size = -(-len(events) // _LARGEST_TIMELINE) or 1
    rows = []
    for start in range(0, len(events), size):
        at = max(range(start, min(start + size, len(events))), key=course.__getitem__)
        event = events[at]
        rows.append(
            {
                "event": at,
                "bytes": course[at],
                "phase": event.site.phase,
                "operation": event.storage.op,
                "module": event.site.module,
                "part": part_of(event.storage),
                "change": event.sign * event.storage.nbytes,
                "line": lines[at].number,
            }
        )
    return rows


def suggestions(found: dict[str, Any], alive: Sequence[Storage]) -> list[dict[str, Any]]:
    """Changes that lower this peak, with the bytes that each saves at most, the largest first; [] when it fits."""
    if found["fits"] is not False:
        return []
    parts: dict[str, int] = found["parts"]
    kept = parts.get("activations", 0) + parts.get("temporaries", 0)
    layers = sum(each.nbytes for each in alive if part_of(each) == "activations" and "*" in _layer(each))
    inputs = max((each.nbytes for each in alive if part_of(each) == "activations" and "*" in _layer(each)), default=0)
    states = parts.get("parameters", 0) + parts.get("gradients", 0) + parts.get("optimizer", 0)
    rows = [
        ("halve the micro-batch and accumulate gradients over two of them", kept // 2),
        ("recompute the layers in backward (torch.utils.checkpoint, gradient_checkpointing_enable)", layers - inputs),
        ("keep the optimizer's states in 8 bits (bitsandbytes' AdamW8bit)", parts.get("optimizer", 0) * 3 // 4),
        ("train adapters instead of all weights (peft's LoRA)", states - parts.get("parameters", 0)),
        ("shard parameters, gradients and states over 8 GPUs (fully_shard)", states * 7 // 8),
    ]
    needed = -found["headroom_bytes"]
    useful = [
        {"change": change, "saves_bytes": saved, "enough": saved >= needed} for change, saved in rows if saved > 0
    ]
    return sorted(useful, key=lambda row: -row["saves_bytes"])


def _layer(storage: Storage) -> str:
    return _FROM_LAYERS.sub("*", _site(storage).module)
