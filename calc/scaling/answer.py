"""The answer of a scaling law: size, tokens, FLOPs and loss, with the neighbours at equal FLOPs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from calc.breakdown import Breakdown, Component, Formula
from calc.errors import InputError
from calc.scaling.fits import FITS, Fit, Parametric, effective_tokens
from calc.scaling.plan import ScalingPlan

# the budgets and sizes that the fits saw; far beyond them they extrapolate
_SEEN = {
    "chinchilla": (6e18, 3e21),
    "chinchilla-refit": (6e18, 3e21),
    "chinchilla-1": (6e18, 3e21),
    "chinchilla-2": (6e18, 3e21),
    "kaplan": (1e15, 1e22),
    "data-constrained": (9e16, 3e22),
}
_ISO_FLOP = tuple(2.0 ** (step / 2) for step in range(-6, 7))  # an eighth to eight times the size


class Point(NamedTuple):
    """A size with its tokens; the loss is None where the fit has none."""

    params: float
    tokens: float
    loss: float | None


@dataclass(frozen=True, slots=True)
class ScalingAnswer:
    """`params`, `tokens` and `flops` (6 N D); the loss in nats a token. `optimum` is the best split of the same FLOPs, `iso_flop` its
    neighbours; `same_loss_flops` the least FLOPs that reach this loss; `inference` the choice that counts serving too."""

    plan: ScalingPlan
    fit: Fit
    params: float
    tokens: float
    flops: float
    loss: float | None
    optimum: Point
    iso_flop: tuple[Point, ...]
    same_loss_flops: float | None
    inference: Point | None
    notes: tuple[str, ...]

    @property
    def breakdown(self) -> Breakdown:
        """The loss by what leaves it, or training FLOPs where the fit has no loss."""
        if not isinstance(self.fit, Parametric):
            formula = Formula(
                r"6 \cdot <N> \cdot <D>", "Kaplan et al. 2020, section 2.1", "https://arxiv.org/abs/2001.08361"
            )
            numbers = {"N": self.params, "D": self.tokens}
            return Breakdown(Component("training", self.flops, formula=formula, numbers=numbers), "FLOPs")
        tokens = effective_tokens(self.tokens, self.plan.unique_tokens)
        fixed, size, data = self.fit.terms(self.params, tokens)
        law, url = self.fit.source, self.fit.url
        leaves = (
            Component("irreducible", fixed, formula=Formula("<E>", law, url), numbers={"E": self.fit.E}),
            Component(
                "size",
                size,
                formula=Formula(r"\frac{<A>}{<N>^{<alpha>}}", law, url),
                numbers={"A": self.fit.A, "N": self.params, "alpha": self.fit.alpha},
            ),
            Component(
                "data",
                data,
                formula=Formula(r"\frac{<B>}{<D>^{<beta>}}", law, url),
                numbers={"B": self.fit.B, "D": tokens, "beta": self.fit.beta},
            ),
        )
        return Breakdown(Component("loss", children=leaves), "nats")

    def as_json(self) -> dict[str, Any]:
        """The answer with the keys of `python -m calc scaling`."""
        return {
            "fit": self.plan.fit,
            "params": self.params,
            "tokens": self.tokens,
            "flops": self.flops,
            "loss": self.loss,
            "tokens_per_parameter": self.tokens / self.params,
            "exponent": self.fit.exponent,
            "optimum": self.optimum._asdict(),
            "iso_flop": [point._asdict() for point in self.iso_flop],
            "same_loss_flops": self.same_loss_flops,
            "inference": self.inference._asdict() if self.inference else None,
            "source": self.fit.source,
            "components": self.breakdown.components(),
            "notes": list(self.notes),
        }


def scaling(plan: ScalingPlan) -> ScalingAnswer:
    """What the fit says of a budget, a size or tokens. InputError where the numbers leave the range of floating point."""
    fit = FITS[plan.fit]
    params, tokens = _split(plan, fit)
    flops = 6 * params * tokens
    if not (params >= 1 and tokens >= 1 and math.isfinite(flops)):
        raise InputError(f"{plan.fit}: the optimum is below one parameter or one token; give a larger budget", "flops")

    def loss(n: float, d: float) -> float | None:
        return sum(fit.terms(n, effective_tokens(d, plan.unique_tokens))) if isinstance(fit, Parametric) else None

    def point(n: float) -> Point:
        return Point(n, flops / (6 * n), loss(n, flops / (6 * n)))

    best = _best_size(fit, flops, loss, plan.unique_tokens)
    here = loss(params, tokens)
    inference = _with_inference(fit, plan, here) if here is not None and plan.inference_tokens else None
    return ScalingAnswer(
        plan=plan,
        fit=fit,
        params=params,
        tokens=tokens,
        flops=flops,
        loss=here,
        optimum=point(best),
        iso_flop=tuple(point(best * step) for step in _ISO_FLOP if best * step >= 1),
        same_loss_flops=_least_flops(fit, here) if isinstance(fit, Parametric) and here is not None else None,
        inference=inference,
        notes=tuple(_notes(plan, fit, flops, tokens)),
    )


def _split(plan: ScalingPlan, fit: Fit) -> tuple[float, float]:
    """Parameters and tokens: as given, or optimal for what is given."""
    if plan.params and plan.tokens:
        return float(plan.params), float(plan.tokens)
    if plan.flops and (plan.params or plan.tokens):
        given = float(plan.params or plan.tokens)
        other = plan.flops / (6 * given)
        return (given, other) if plan.params else (other, given)
    if plan.params:
        return float(plan.params), fit.flops_of(plan.params) / (6 * plan.params)
    if plan.tokens:  # D = C / 6N and N = N(C): tokens rise with the budget
        flops = _where(lambda c: c / (6 * fit.parameters(c)), float(plan.tokens), 1.0, 1e45)
        return fit.parameters(flops), float(plan.tokens)
    params = fit.parameters(plan.flops)
    if plan.unique_tokens and isinstance(fit, Parametric):
        law = fit
        params = _best_size(
            fit, plan.flops, lambda n, d: sum(law.terms(n, effective_tokens(d, plan.unique_tokens))), plan.unique_tokens
        )
    return params, plan.flops / (6 * params)


def _best_size(fit: Fit, flops: float, loss: Callable[[float, float], float | None], unique: int) -> float:
    """The size of least loss at equal FLOPs: the closed form, or by golden-section search where data repeat."""
    best = fit.parameters(flops)
    if not unique or flops / (6 * best) <= unique:
        return best

    def at(logarithm: float) -> float:
        n = math.exp(logarithm)
        found = loss(n, flops / (6 * n))
        return math.inf if found is None else found

    if at(math.log(best)) == math.inf:
        return best
    return math.exp(_least(at, math.log(best) - 5, math.log(best) + 10))


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one minimum is least, to nine digits (golden section)."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(90):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if function(left) < function(right) else (left, high)
    return (low + high) / 2


def _where(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where a rising function reaches the target, by bisection of logarithms."""
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return math.sqrt(low * high)


def _least_flops(fit: Parametric, target: float) -> float:
    """The compute-optimal budget of a loss."""

    def gain(flops: float) -> float:
        n = fit.parameters(flops)
        return -sum(fit.terms(n, flops / (6 * n)))

    return _where(gain, -target, 1.0, 1e45)


def _with_inference(fit: Fit, plan: ScalingPlan, target: float) -> Point | None:
    """The size and tokens of the same loss with the least 6 N D + 2 N D_inference (Sardana et al. 2024, arXiv 2401.00448)."""
    if not isinstance(fit, Parametric):
        return None
    law = fit
    smallest = float((law.A / (target - law.E)) ** (1 / law.alpha))  # with endless data

    def tokens(n: float) -> float:
        return float((law.B / (target - law.E - law.A / n**law.alpha)) ** (1 / law.beta))

    def total(logarithm: float) -> float:
        n = smallest * (1 + math.exp(logarithm))
        return 6 * n * tokens(n) + 2 * n * plan.inference_tokens

    n = smallest * (1 + math.exp(_least(total, -20.0, 20.0)))
    return Point(n, tokens(n), target)


def _notes(plan: ScalingPlan, fit: Fit, flops: float, tokens: float) -> list[str]:
    low, high = _SEEN[plan.fit]
    notes = []
    if not low <= flops <= high:
        notes.append(f"{plan.fit}: {flops:.3g} FLOPs lie outside the {low:g} to {high:g} of its runs: extrapolated")
    if not isinstance(fit, Parametric):
        notes.append(f"{plan.fit}: it gives optima alone, no loss")
        if plan.unique_tokens or plan.inference_tokens:
            notes.append("unique_tokens, inference_tokens: without a loss they change nothing")
    if plan.fit == "kaplan":
        notes.append("kaplan: parameters without embeddings; fitted to small models with one learning-rate schedule")
    if plan.fit == "chinchilla":
        notes.append(
            "chinchilla: approach 3's rounded constants; the 20 tokens a parameter are those of approaches 1 and 2"
        )
    if plan.unique_tokens and tokens > plan.unique_tokens:
        epochs = tokens / plan.unique_tokens
        notes.append(
            f"unique_tokens: {epochs:.3g} epochs, worth {effective_tokens(tokens, plan.unique_tokens):.3g} new tokens"
        )
    return notes
