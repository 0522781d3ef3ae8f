"""Reads a log line by line, however long: colours are dropped, and nothing of it is kept but the facts that are known."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Final

from calc.errors import InputError
from calc.serving.logs.patterns import PATTERNS
from calc.units import GiB, MiB

LARGEST: Final = 100 * 10**6  # bytes of a log
_LONGEST_LINE: Final = 20_000  # characters; the rest of a line is not looked at
_COLOUR: Final = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|#\x1b?\[[0-9;]*m|\x1b\][^\x07]*\x07")
_UNITS: Final = (("_gib", GiB), ("_mib", MiB))
_HOST: Final = ("CPU", "CUDA_Host", "Host", "CPU_Mapped")


@dataclass(frozen=True, slots=True)
class LogFacts:
    """What a log says. `bytes` has weights, activation, non_torch, graphs, kv_budget, cache, total, host_weights and the like; `words`
    everything else as text. `lines` says where each came from, counted from 1."""

    engine: str
    bytes: dict[str, int]
    words: dict[str, str]
    lines: dict[str, int]


def read(source: Iterable[str]) -> LogFacts:
    """The facts of a log. InputError when it is over 100 MB, or when no line is one that a known engine prints.

    The first line that states a fact counts (a worker's log repeats it for every rank), except where buffers add up.
    """
    values: dict[str, int] = {}
    words: dict[str, str] = {}
    lines: dict[str, int] = {}
    engines: Counter[str] = Counter()
    for number, line in enumerate(_lines(source), 1):
        for pattern in PATTERNS:
            if pattern.marker not in line:
                continue
            match = pattern.regex.search(line)
            if match is None:
                continue
            engines[pattern.engine] += 1
            found = {name: text for name, text in match.groupdict().items() if text is not None}
            where = "host_" if any(found.get("device", "").startswith(host) for host in _HOST) else ""
            for name, text in found.items():
                key, value = _value(name, text)
                if value is None:
                    words.setdefault(key, text)
                elif where + key not in values or pattern.adds:
                    values[where + key] = values.get(where + key, 0) + value
                lines.setdefault(where + key, number)
    if not engines:
        raise InputError(
            "log: no line of it is one that vLLM, SGLang, TensorRT-LLM, llama.cpp or Ollama prints at start-up", "log"
        )
    return LogFacts(engines.most_common(1)[0][0], values, words, lines)


def _lines(source: Iterable[str]) -> Iterator[str]:
    read_so_far = 0
    for line in source:
        read_so_far += len(line)
        if read_so_far > LARGEST:
            raise InputError(f"log: it is over {LARGEST // 10**6} MB; the start-up alone is enough", "log")
        yield _COLOUR.sub("", line[:_LONGEST_LINE])


def bounded_lines(stream: IO[str]) -> Iterator[str]:
    """The lines of a stream, none longer than is looked at: what is beyond comes as lines of its own."""
    while line := stream.readline(_LONGEST_LINE):
        yield line


def _value(name: str, text: str) -> tuple[str, int | None]:
    for ending, unit in _UNITS:
        if name.endswith(ending):
            return name.removesuffix(ending), round(float(text.replace(",", "")) * unit)
    return name, None
