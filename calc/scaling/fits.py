"""The published fits, each with its constants and source. C is training FLOPs, N parameters, D tokens; C = 6 N D throughout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

PETAFLOP_DAY: Final = 8.64e19


@dataclass(frozen=True, slots=True)
class Parametric:
    """L(N, D) = E + A / N^alpha + B / D^beta, in nats a token; least for C = 6 N D at N = G (C/6)^(beta / (alpha + beta))."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    source: str
    url: str

    @property
    def exponent(self) -> float:
        """a of N ~ C^a."""
        return self.beta / (self.alpha + self.beta)

    @property
    def _g(self) -> float:
        return float((self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta)))

    def parameters(self, flops: float) -> float:
        """The compute-optimal size of a budget."""
        return float(self._g * (flops / 6) ** self.exponent)

    def flops_of(self, parameters: float) -> float:
        """The budget for which that size is optimal."""
        return float(6 * (parameters / self._g) ** (1 / self.exponent))

    def terms(self, parameters: float, tokens: float) -> tuple[float, float, float]:
        """What cannot be removed, what the size leaves, what the data leave: they sum to the loss."""
        return self.E, float(self.A / parameters**self.alpha), float(self.B / tokens**self.beta)


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """N = anchor_parameters (C / anchor_flops)^exponent: a line through optima, without a loss."""

    anchor_parameters: float
    anchor_flops: float
    exponent: float
    source: str
    url: str

    def parameters(self, flops: float) -> float:
        """The compute-optimal size of a budget."""
        return float(self.anchor_parameters * (flops / self.anchor_flops) ** self.exponent)

    def flops_of(self, parameters: float) -> float:
        """The budget for which that size is optimal."""
        return float(self.anchor_flops * (parameters / self.anchor_parameters) ** (1 / self.exponent))


def _through(first: tuple[float, float], last: tuple[float, float], source: str) -> PowerLaw:
    """The line through two rows (parameters, tokens) of a published table: its exponent has more digits than the text gives."""
    (n0, d0), (n1, d1) = first, last
    exponent = math.log(n1 / n0) / math.log(n1 * d1 / (n0 * d0))
    return PowerLaw(n0, 6 * n0 * d0, exponent, source, _CHINCHILLA_URL)


_CHINCHILLA_URL = "https://arxiv.org/abs/2203.15556"
Fit = Parametric | PowerLaw
FITS: Final[dict[str, Fit]] = {
    "chinchilla": Parametric(
        1.69, 406.4, 410.7, 0.34, 0.28, "Hoffmann et al. 2022, approach 3, the rounded constants of equation 10", _CHINCHILLA_URL
    ),
    "chinchilla-refit": Parametric(
        1.8172, 482.01, 2085.43, 0.3478, 0.3658, "Besiroglu et al. 2024, the same runs fitted again", "https://arxiv.org/abs/2404.10102"
    ),
    "chinchilla-1": _through((1e10, 205.1e9), (1e13, 216.2e12), "Hoffmann et al. 2022, approach 1: table 3 (a = 0.50)"),
    "chinchilla-2": _through((1e10, 219.5e9), (1e13, 292.0e12), "Hoffmann et al. 2022, approach 2: table A3 (a = 0.49)"),
    "kaplan": PowerLaw(
        1.3e9, PETAFLOP_DAY, 0.73, "Kaplan et al. 2020, table 6: N = 1.3e9 PF-days^0.73, without embeddings", "https://arxiv.org/abs/2001.08361"
    ),
    "data-constrained": Parametric(
        math.exp(0.6254804), math.exp(6.255414), math.exp(7.3049974), 0.3526596, 0.3526596,
        "Muennighoff et al. 2023, appendix A (C4)", "https://arxiv.org/abs/2305.16264",
    ),
}  # fmt: skip
# how fast repeated tokens lose their worth, in repetitions: Muennighoff et al. 2023, section 5
REPETITIONS: Final = 15.387756


def effective_tokens(tokens: float, unique: float) -> float:
    """What `tokens` drawn from `unique` ones are worth in new ones: U + U R* (1 - exp(-R / R*)), R the repetitions after the first."""
    if not unique or tokens <= unique:
        return tokens
    repeated = tokens / unique - 1
    return unique + unique * REPETITIONS * -math.expm1(-repeated / REPETITIONS)
