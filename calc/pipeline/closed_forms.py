"""What the literature says in closed form about a schedule, to be laid against the simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from calc.breakdown import Formula, Number
from calc.pipeline.plan import PipelinePlan

_EVEN = "every stage takes the same time, and sending takes none"
_HUANG = ("GPipe, arXiv 1811.06965, section 2.3", "https://arxiv.org/abs/1811.06965")
_NARAYANAN = ("Megatron-LM, arXiv 2104.04473, section 2.2", "https://arxiv.org/abs/2104.04473")
_KORTHIKANTI = (
    "Reducing Activation Recomputation, arXiv 2205.05198, section 4.2.3",
    "https://arxiv.org/abs/2205.05198",
)
_LAMY = ("Breadth-First Pipeline Parallelism, arXiv 2211.05953, section 3", "https://arxiv.org/abs/2211.05953")
_QI = ("Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2", "https://arxiv.org/abs/2401.10241")
_QI_V = ("Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6", "https://arxiv.org/abs/2401.10241")
_DEEPSEEK = ("DualPipe, table of the README, p = half its PP", "https://github.com/deepseek-ai/DualPipe")
_HELD = "counted on stage 0, from a forward to the end of its backward"


class _Case(NamedTuple):
    """The letters of the formulas, for one chunk: B is a whole backward, I and W its input and weight gradients."""

    p: int
    m: int
    v: int
    F: float
    I: float  # noqa: E741  (the field's letter)
    W: float


class _Form(NamedTuple):
    quantity: str
    latex: str
    value: Callable[[_Case], Number]
    holds: Callable[[_Case], bool]
    source: tuple[str, str]
    assumes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """A published value against the simulated one.

    `quantity` is the answer's name for it. `applies` says whether the plan meets the formula's assumptions: then the two
    values agree. Where it does not, the formula is a guide and the simulation is the answer.
    """

    quantity: str
    value: Number
    applies: bool
    formula: Formula
    numbers: Mapping[str, Number]

    def as_json(self, simulated: Number) -> dict[str, Any]:
        """The form as JSON, with the simulated value."""
        return {
            "quantity": self.quantity,
            "value": self.value,
            "simulated": simulated,
            "applies": self.applies,
            "formula": self.formula.symbolic(),
            "with_numbers": self.formula.with_numbers(self.numbers),
            "source": self.formula.source,
            "url": self.formula.url,
            "assumes": list(self.formula.assumes),
        }


def _always(case: _Case) -> bool:
    return True


_NAIVE = _Form("utilization", r"\frac{1}{<p>}", lambda c: 1 / c.p, _always, _HUANG, (_EVEN,))
_UTILIZATION = _Form(
    "utilization", r"\frac{<m>}{<m> + <p> - 1}", lambda c: c.m / (c.m + c.p - 1), _always, _HUANG, (_EVEN,)
)
_FLUSH = _Form("bubble_over_ideal", r"\frac{<p> - 1}{<m>}", lambda c: (c.p - 1) / c.m, _always, _NARAYANAN, (_EVEN,))
_RAMPS = _Form(
    "makespan_bubble",
    r"( <p> - 1 ) \cdot ( <F> + <I> + <W> )",
    lambda c: (c.p - 1) * (c.F + c.I + c.W),
    _always,
    _QI,
    (_EVEN,),
)
_HELD_1F1B = _Form("in_flight", r"\min(<m>, <p>)", lambda c: min(c.m, c.p), _always, _NARAYANAN, (_HELD,))
_CHUNKED = r"\frac{<p> - 1}{<v> \cdot <m>}"

_FORMS: Mapping[str, tuple[_Form, ...]] = {
    "naive": (_NAIVE,),
    "gpipe": (
        _UTILIZATION,
        _FLUSH,
        _RAMPS,
        _Form("in_flight", "<m>", lambda c: c.m, _always, _NARAYANAN, (_HELD,)),
    ),
    "1f1b": (_UTILIZATION, _FLUSH, _RAMPS, _HELD_1F1B),
    "pipedream": (_UTILIZATION, _HELD_1F1B),
    "interleaved": (
        _Form(
            "bubble_over_ideal",
            _CHUNKED,
            lambda c: (c.p - 1) / (c.v * c.m),
            lambda c: c.m % c.p == 0,
            _NARAYANAN,
            (_EVEN, "p divides m"),
        ),
        _Form(
            "in_flight",
            r"\min(<m> \cdot <v>, 2 \cdot ( <p> - 1 ) + ( <v> - 1 ) \cdot <p> + 1)",
            lambda c: min(c.m * c.v, 2 * (c.p - 1) + (c.v - 1) * c.p + 1),
            lambda c: c.m % c.p == 0,
            _KORTHIKANTI,
            (_HELD, "p divides m"),
        ),
    ),
    "looped-bfs": (
        _Form(
            "bubble_over_ideal",
            _CHUNKED,
            lambda c: (c.p - 1) / (c.v * c.m),
            lambda c: c.m >= c.p,
            _LAMY,
            (_EVEN, "m is at least p"),
        ),
        _Form("in_flight", r"<m> \cdot <v>", lambda c: c.m * c.v, _always, _LAMY, (_HELD,)),
    ),
    "zb-h1": (
        _Form(
            "makespan_bubble",
            r"( <p> - 1 ) \cdot ( <F> + <I> - <W> )",
            lambda c: (c.p - 1) * (c.F + c.I - c.W),
            lambda c: c.m >= c.p and min(c.F, c.I) >= c.W,
            _QI,
            (_EVEN, "W is at most F and at most I", "m is at least p"),
        ),
        _Form("in_flight", r"\min(<m>, <p>)", lambda c: min(c.m, c.p), _always, _QI, (_HELD,)),
    ),
    "zb-h2": (
        _Form(
            "span_bubble",
            r"( <p> - 1 ) \cdot ( <F> + <I> - 2 \cdot <W> )",
            lambda c: (c.p - 1) * (c.F + c.I - 2 * c.W),
            lambda c: c.m >= 2 * c.p - 1 and min(c.F, c.I) >= c.W,
            _QI,
            (_EVEN, "W is at most F and at most I", "m is at least 2p - 1"),
        ),
        _Form("in_flight", r"\min(<m>, 2 \cdot <p> - 1)", lambda c: min(c.m, 2 * c.p - 1), _always, _QI, (_HELD,)),
    ),
    "zb-v": (
        _Form(
            "span_bubble",
            "0",
            lambda c: 0,
            lambda c: c.m >= 2 * c.p - 1 and c.F == c.I == c.W,
            _QI_V,
            (_EVEN, "F, I and W are equal", "m is at least 2p - 1"),
        ),
        _Form("in_flight", r"2 \cdot <p>", lambda c: 2 * c.p, lambda c: c.m >= 2 * c.p - 1, _QI_V, (_HELD,)),
    ),
    "dualpipe-v": (
        _Form(
            "makespan_bubble",
            r"( <p> - 1 ) \cdot ( ( <F> + <I> + <W> ) + ( <I> + <W> ) - 3 \cdot <W> )",
            lambda c: (c.p - 1) * ((c.F + c.I + c.W) + (c.I + c.W) - 3 * c.W),
            lambda c: c.p == 1,
            _DEEPSEEK,
            (
                _EVEN,
                "F, I and W are equal",
                "a forward and the backward with it run as one block, which hands nothing on before its end; the simulation "
                "runs one after the other and hands each on at its end, which leaves less of a bubble",
            ),
        ),
        _Form("in_flight", r"2 \cdot <p> + 1", lambda c: 2 * c.p + 1, lambda c: c.m > 2 * c.p, _DEEPSEEK, (_HELD,)),
    ),
}


def closed_forms(plan: PipelinePlan) -> tuple[ClosedForm, ...]:
    """The published forms for the plan's schedule; none when chunks take unequal times (F, I and W have no one value) or sends take any."""
    if not plan.even or plan.send:
        return ()
    times = tuple(plan.seconds(name)[0] for name in ("forward", "backward_input", "backward_weight"))
    case = _Case(plan.stages, plan.microbatches, plan.chunks, *times)
    numbers = case._asdict()
    return tuple(
        ClosedForm(
            quantity=form.quantity,
            value=form.value(case),
            applies=form.holds(case),
            formula=Formula(form.latex, *form.source, form.assumes),
            numbers={letter: value for letter, value in numbers.items() if f"<{letter}>" in form.latex},
        )
        for form in _FORMS.get(plan.schedule, ())
    )
