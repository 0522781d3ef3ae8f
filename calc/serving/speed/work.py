"""The kinds of work in a step: what sees only its tokens, and what sees its sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
BYTES = 2  # of an activation


@dataclass(frozen=True, slots=True)
class Layout:
    """How a replica is divided: attention over `tp` ranks, `dp` times; each expert over tp x dp / ep ranks; layers over `pp` stages,
    which a step passes one after another."""

    tp: int
    ep: int
    dp: int
    pp: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    @property
    def expert_tp(self) -> int:
        return self.ranks // self.ep


@dataclass(frozen=True, slots=True)
class TokenWork:
    """An operation whose seconds follow from the tokens of the step. `of_replica`: of all data-parallel ranks together."""

    path: str
    count: int
    seconds: Callable[[Array], Array]
    of_replica: bool = False


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """An operation that mixes tokens: `decode(sequences, context, tokens each)` and `prefill(sequences, new tokens, context)`.
    `launches`: kernels that the host starts for one prefill."""

    path: str
    count: int
    decode: Callable[[Array, Array], Array]
    prefill: Callable[[Array, Array, Array], Array]
    launches: int = 1


Work = TokenWork | SequenceWork
