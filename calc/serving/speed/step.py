"""The seconds of one step: so many sequences that decode, and so many that prefill, on one replica."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calc.breakdown import Component
from calc.serving.speed.operations import Operations
from calc.serving.speed.tables import Grid
from calc.serving.speed.work import SequenceWork, TokenWork

Array = NDArray[np.float64]
# The host's time to launch one operation of a step outside a CUDA graph: what an eager quantised matmul of vLLM takes at the least on
# H100 and H200 in the kernel tables (its kernel 4 µs). TensorRT-LLM says the same of the whole step: DeepSeek-R1 at batch 1 on 8 B200 is
# 7.2 times slower without graphs (tech blog 2), about 65 µs for each of our operations.
LAUNCH = 55e-6
_TOKENS = (0, 18 * 4 + 1, 4)  # 1 to 262,144, four knots a doubling
_SEQUENCES = (0, 14 * 2 + 1, 2)
_CONTEXT = (6, 19, 1)  # 64 to 16,777,216
_PREFILLS = (0, 8, 1)
_QUERY = (4, 15, 1)  # 16 to 262,144


@dataclass(frozen=True)
class StepTimes:
    """The operations of a step, summed on grids: reading one takes microseconds.

    A step with prompts of more than `graph_tokens` launches each operation from the host, a smaller one its attention alone: the
    step takes at least that long. `eager`: so does every decode step.
    """

    operations: Operations
    graph_tokens: int = 512
    eager: bool = False
    _rank: Grid = field(init=False, repr=False)
    _replica: Grid = field(init=False, repr=False)
    _head: Grid = field(init=False, repr=False)
    _decode: Grid = field(init=False, repr=False)
    _prefill: Grid = field(init=False, repr=False)
    _draft: Grid = field(init=False, repr=False)
    launch: float = field(init=False)
    launch_attention: float = field(init=False)

    def __post_init__(self) -> None:
        works = self.operations.all()
        tokens = [work for work in works if isinstance(work, TokenWork)]
        mixing = [work for work in works if isinstance(work, SequenceWork)]

        alone = self.operations.layout.dp == 1  # the rank's tokens are the replica's

        def of_rank(m: Array) -> Any:
            return sum(work.count * work.seconds(m) for work in tokens if alone or not work.of_replica) + 0 * m

        def of_replica(m: Array) -> Any:
            return sum(work.count * work.seconds(m) for work in tokens if work.of_replica and not alone) + 0 * m

        def decode(b: Array, context: Array) -> Any:
            return sum(work.count * work.decode(b, context) for work in mixing) + 0 * b

        def prefill(n: Array, new: Array, context: Array) -> Any:
            return sum(work.count * work.prefill(n, new, context) for work in mixing) + 0 * n

        launch = LAUNCH if self.operations.times.source != "roofline" else 0.0
        for name, value in (
            ("_rank", Grid(of_rank, _TOKENS)),
            ("_replica", Grid(of_replica, _TOKENS)),
            ("_head", Grid(self.operations.head, _SEQUENCES)),
            ("_decode", Grid(decode, _SEQUENCES, _CONTEXT)),
            ("_prefill", Grid(prefill, _PREFILLS, _QUERY, _CONTEXT)),
            ("_draft", Grid(self.operations.draft, _SEQUENCES)),
            ("launch", launch * sum(work.count * getattr(work, "launches", 1) for work in works)),
            ("launch_attention", launch * sum(work.count * work.launches for work in mixing)),
        ):
            object.__setattr__(self, name, value)

    def decode(self, sequences: Any, context: Any) -> Any:
        """Seconds of a step in which so many sequences of that mean context make a token each (or check a draft)."""
        return self.mixed(sequences, context, 0, 0, 0)

    def mixed(self, sequences: Any, context: Any, prefills: Any, new: Any, cached: Any) -> Any:
        """Seconds of a step with decoding sequences and with `prefills` prompts of `new` tokens each after `cached` ones."""
        dp, query = self.operations.layout.dp, self.operations.query
        own, tokens = sequences / dp, sequences * query + prefills * new
        full = (
            prefills / dp if isinstance(prefills, np.ndarray) else float(-(-prefills // dp))
        )  # of the rank with the most
        total = self._rank(own * query + full * new) + self._head(own * query + full)
        if dp > 1:
            total = total + self._replica(tokens)
        if query > 1:
            total = total + _where(sequences, (query - 1) * self._draft(own))
        total = total + _where(sequences, self._decode(own, context))
        if isinstance(prefills, np.ndarray) or prefills:
            total = total + _where(prefills, self._prefill(full, new, cached))
        pieces = tokens <= self.graph_tokens
        host = self.launch_attention * pieces + self.launch * (1 - pieces)
        return _larger(total, self.launch if self.eager else _where(prefills, host))

    def components(self, sequences: float, context: float) -> tuple[Component, ...]:
        """The operations of one decode step as a tree of seconds."""
        dp, query = self.operations.layout.dp, self.operations.query
        own = np.array([sequences / dp])
        tree: dict[str, Any] = {}
        for work in self.operations.all():
            if isinstance(work, TokenWork):
                seconds = work.seconds(own * query * (dp if work.of_replica else 1))
            else:
                seconds = work.decode(own, np.array([float(context)]))
            _put(tree, work.path.split("/"), work.count * float(np.asarray(seconds).ravel()[0]))
        _put(tree, ["head"], float(self.operations.head(own * query)[0]))
        return _components(tree)


def _larger(one: Any, other: Any) -> Any:
    arrays = isinstance(one, np.ndarray) or isinstance(other, np.ndarray)
    return np.maximum(one, other) if arrays else max(one, other)


def _where(number: Any, seconds: Any) -> Any:
    return np.where(number > 0, seconds, 0.0) if isinstance(number, np.ndarray) else seconds if number else 0.0


def _put(tree: dict[str, Any], path: list[str], seconds: float) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = tree.get(path[-1], 0.0) + seconds


def _components(tree: dict[str, Any]) -> tuple[Component, ...]:
    return tuple(
        Component(name, children=_components(value)) if isinstance(value, dict) else Component(name, value)
        for name, value in tree.items()
    )
