"""The operations of one step of a served model on one rank, each with the seconds that measured kernels give it.

A step computes some sequences that decode (one token each, or a few with a draft) and some that prefill. Most operations see
only how many tokens there are; attention and recurrences see the sequences. Collectives are those of tensor, expert and
data-parallel attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from calc.model.spec import Layer
from calc.model.weights import Part
from calc.serving.speed.attention import mixer_operations
from calc.serving.speed.feed_forward import feed_forward_operations
from calc.serving.speed.rank import Rank
from calc.serving.speed.work import BYTES, Array, TokenWork, Work
from calc.units import ceil_div


@dataclass(frozen=True, slots=True)
class Operations(Rank):
    """All operations of a rank."""

    def all(self) -> tuple[Work, ...]:
        """Every operation of a step, but the head: that sees only the sequences that sample."""
        found: list[Work] = [self._embedding()]
        kinds = list(zip(self.spec.layers.kinds, self.spec.layers.kind_parts, self.spec.layers.counts, strict=True))
        names = _unique([kind.kind for kind, _, _ in kinds])
        for name, (kind, parts, count) in zip(names, kinds, strict=True):
            prefix = "layers" if len(kinds) == 1 else f"layers/{name}"
            for work in self._layer(kind, parts):
                found.append(_placed(work, prefix, count))
        if self.layout.pp > 1:
            found.append(TokenWork("pipeline/send", self.layout.pp - 1, self.send))
        return tuple(found)

    def head(self, sequences: Array) -> Array:
        """Logits and sampling of so many sequences: the head is divided by the vocabulary, its logits are gathered."""
        spec, tp = self.spec, self.layout.tp
        if not spec.has_head:
            return np.zeros_like(sequences)
        logits = sequences * spec.vocab_size
        seconds = self.times.gemm(sequences, ceil_div(spec.vocab_size, tp), spec.hidden_size, dtype="bf16")
        if tp > 1:
            seconds = seconds + self.times.collective("all_gather", logits * BYTES, tp)
        # greedy or random sampling reads the logits in fp32 a few times: cast, softmax, the choice
        return seconds + self.times.memory_bound(logits * 2, logits * 4) + self.times.memory_bound(logits * 4)

    def draft(self, sequences: Array) -> Array:
        """One pass of the draft for so many sequences: a layer like the model's last and the head (multi-token prediction, EAGLE)."""
        last = self.spec.layers.pattern[-1]
        works = self._layer(self.spec.layers.kinds[last], self.spec.layers.kind_parts[last])
        tokens = [work for work in works if isinstance(work, TokenWork)]
        dp = self.layout.dp
        return self.head(sequences) + sum(work.seconds(sequences * (dp if work.of_replica else 1)) for work in tokens)

    def _embedding(self) -> TokenWork:
        h, tp = self.spec.hidden_size, self.layout.tp

        def seconds(tokens: Array) -> Array:
            look_up = self.times.memory_bound(tokens * h * BYTES, tokens * h * BYTES)
            return look_up + self.all_reduce(tokens) if tp > 1 else look_up

        return TokenWork("embedding", 1, seconds)

    def _layer(self, kind: Layer, parts: tuple[Part, ...]) -> Iterator[Work]:
        for mixer in kind.mixers:
            yield self.norm("norms/mixer")
            own = {part.name for part in mixer.parts}
            yield from mixer_operations(self, kind, mixer, [part for part in parts if part.name in own])
            if self.layout.tp > 1:
                yield TokenWork("all_reduce/mixer", 1, self.all_reduce)
        if kind.feed_forward:
            yield self.norm("norms/feed_forward")
            yield from feed_forward_operations(self, kind, kind.feed_forward, parts)


def _placed(work: Work, prefix: str, count: int) -> Work:
    changes: dict[str, Any] = {"path": f"{prefix}/{work.path}", "count": work.count * count}
    return replace(work, **changes)


def _unique(names: list[str]) -> list[str]:
    return [
        name if names.index(name) == at else f"{name}_{names[: at + 1].count(name)}" for at, name in enumerate(names)
    ]
