"""Training memory on a grid of models, shapes and programs: the formula against the traced program, case by case (see tests/recorded).

`pytest -s` prints the table. `TRAINING_GRID_SEED` draws another sample outside the grid, `TRAINING_GRID_SAMPLE` a larger one.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest

from calc.catalogue import load_config
from calc.errors import InputError
from calc.model.config import from_config
from calc.training import TrainingPlan, train
from measure.trace import TraceOptions
from tests.recorded.traces import traced

pytestmark = pytest.mark.recorded

LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj")  # the linear layers of attention
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")

# A model of each family, and its attention's linear layers; families with programs of their own, and models with a tower, are
# in test_training_families.py. Tied: llama-3.2, qwen2.5-0.5b, qwen3-0.6b, Gemma, GPT-2.
MODELS = {
    "llama-2-7b": LLAMA,
    "llama-3.2-1b": LLAMA,
    "qwen2.5-0.5b": LLAMA,
    "qwen2-7b": LLAMA,
    "qwen3-0.6b": LLAMA,
    "qwen3-8b": LLAMA,
    "mistral-7b-v0.1": LLAMA,
    "gemma-2-2b": LLAMA,
    "gemma-3-1b-it": LLAMA,
    "phi-3-mini-4k-instruct": ("qkv_proj", "o_proj"),
    "gpt2": ("c_attn",),
    "olmo-2-1124-7b": LLAMA,
    "mixtral-8x7b-v0.1": LLAMA,
    "qwen3-30b-a3b": LLAMA,
    "deepseek-v2-lite": ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "deepseek-v3": LATENT,
    "gpt-oss-20b": LLAMA,
}
# Larger or newer members of the same families: what the random sample draws from.
OTHERS = {
    "meta-llama-3-8b": LLAMA,
    "llama-3.2-3b": LLAMA,
    "qwen2.5-14b": LLAMA,
    "qwen3-4b": LLAMA,
    "mistral-nemo-instruct-2407": LLAMA,
    "gemma-2-9b": LLAMA,
    "phi-3.5-mini": ("qkv_proj", "o_proj"),
    "gpt2-medium": ("c_attn",),
    "olmo-2-1124-13b": LLAMA,
    "mixtral-8x22b-v0.1": LLAMA,
    "qwen3-235b-a22b": LLAMA,
    "gpt-oss-120b": LLAMA,
}
RECIPES, RECOMPUTES, ATTENTIONS = ("pure-bf16", "amp", "fp32"), ("none", "full"), ("sdpa", "eager")
METHODS = ("full", "lora attention", "lora all-linear", "dora attention", "dora all-linear")
# (recipe, recompute, attention, method): all of full training, and adapters over the rest.
PROGRAMS = (
    *((recipe, recompute, attention, "full") for recipe in RECIPES for recompute in RECOMPUTES for attention in ATTENTIONS),
    *(("pure-bf16", recompute, "sdpa", method) for recompute in RECOMPUTES for method in METHODS[1:3]),
    ("amp", "none", "sdpa", "lora all-linear"),
    ("amp", "full", "eager", "lora attention"),
    ("fp32", "none", "sdpa", "lora attention"),
    ("fp32", "full", "sdpa", "lora attention"),
    ("pure-bf16", "none", "sdpa", "dora attention"),
    ("amp", "full", "sdpa", "dora all-linear"),
)  # fmt: skip
# (seq, micro_batch). Each model meets each shape, with another program than its neighbour.
SHAPES = (
    (128, 8),
    (512, 2),
    (2048, 1),
    (300, 3),
    (4096, 2),
    (1024, 4),
    (16384, 1),
    (8192, 2),
    (32768, 1),
    (640, 8),
    (2050, 5),
)
# (model, seq, micro_batch, program): what the grid once missed, since no other case peaks there.
EXTRA = (("gpt-oss-20b", 4096, 1, ("amp", "full", "sdpa", "lora attention")),)  # scores of a softmax with sinks
LEARNED_POSITIONS = 1024  # GPT-2's
SAMPLE = int(os.environ.get("TRAINING_GRID_SAMPLE", "6"))
SEED = int(os.environ.get("TRAINING_GRID_SEED", "20261130"))


class Case(NamedTuple):
    model: str
    seq: int
    micro_batch: int
    recipe: str
    recompute: str
    attention: str
    method: str

    def __str__(self) -> str:
        return " ".join(str(value) for value in self)


class Compared(NamedTuple):
    """Bytes told by the formula and seen in the trace."""

    activations: tuple[int, int]
    peak: tuple[int, int]
    phase: str

    @property
    def errors(self) -> tuple[float, float]:
        """Of the activations and of the peak, as shares of what was seen."""
        return tuple((predicted - seen) / seen for predicted, seen in (self.activations, self.peak))


def _length(model: str, seq: int) -> int:
    return min(seq, LEARNED_POSITIONS) if model.startswith("gpt2") else seq


def _stacked_experts(case: Case) -> bool:
    return case.method.endswith("all-linear") and case.model.startswith(
        ("mixtral", "qwen3-30b", "qwen3-235b", "deepseek")
    )


def grid() -> Iterator[Case]:
    for row, model in enumerate(MODELS):
        for column, program in enumerate(PROGRAMS):
            seq, micro_batch = SHAPES[(row + column) % len(SHAPES)]
            yield Case(model, _length(model, seq), micro_batch, *program)
    for model, seq, micro_batch, program in EXTRA:
        yield Case(model, seq, micro_batch, *program)


def sample(seed: int, size: int) -> Iterator[Case]:
    """Cases that the grid does not hold: other models, lengths and combinations."""
    draw = random.Random(seed)
    for _ in range(size):
        model, method = draw.choice(list(OTHERS)), draw.choice(METHODS)
        seq = _length(model, int(2 ** draw.uniform(7, 15)))
        yield Case(
            model, seq, draw.randint(1, 8), draw.choice(RECIPES), draw.choice(RECOMPUTES), draw.choice(ATTENTIONS), method
        )  # fmt: skip


GRID = tuple(grid())
DRAWN = tuple(sample(SEED, SAMPLE))
HELD = tuple(case for case in GRID if not _stacked_experts(case))
HELD_DRAWN = tuple(case for case in DRAWN if not _stacked_experts(case))


# What the formula refuses, since it has no ledger for it: peft adapts the stacked experts of these under all-linear.
REFUSED = tuple(case for case in GRID + DRAWN if _stacked_experts(case))


def options_of(case: Case) -> dict[str, Any]:
    method, _, targets = case.method.partition(" ")
    found = {name: getattr(case, name) for name in ("seq", "micro_batch", "recipe", "recompute")}
    if method != "full":
        attention = {**MODELS, **OTHERS}[case.model]
        found |= {"method": method, "lora_targets": attention if targets == "attention" else (targets,)}
    return found


@cache
def compared(case: Case) -> Compared:
    config, options = load_config(case.model), options_of(case)
    # where a class has no SDPA, transformers runs eager when nobody asks: the formula knows which
    attention = "auto" if case.attention == "sdpa" else "eager"
    seen = traced(case.model, config, TraceOptions(attention=attention, **options))
    predicted = train(from_config(config, case.model), TrainingPlan(attention=case.attention, **options))
    assert (predicted.parameters_bytes, predicted.gradients_bytes) == (seen.parameters_bytes, seen.gradients_bytes)
    assert predicted.optimizer_bytes == seen.optimizer_bytes
    activations = predicted.activations_bytes, seen.activations_bytes
    return Compared(activations, (predicted.peak_bytes, seen.peak_bytes), seen.peak_phase)


def table(cases: tuple[Case, ...]) -> str:
    rows = [f"{'case':72}{'activations':>20}{'error':>10}{'peak':>20}{'error':>10}  phase"]
    for case in cases:
        found = compared(case)
        activations, peak = found.errors
        rows.append(
            f"{case!s:72}{found.activations[1]:>20,}{activations:>10.4%}{found.peak[1]:>20,}{peak:>10.4%}  {found.phase}"
        )
    errors = [compared(case).errors for case in cases]
    exact = sum(error == (0, 0) for error in errors)
    rows.append(
        f"{len(cases)} cases, {exact} to the byte; largest error of activations {_largest(errors, 0):.4%}, of the peak "
        f"{_largest(errors, 1):.4%}; median of the peak {_median(errors):.4%}"
    )
    return "\n".join(rows)


def _largest(errors: list[tuple[float, float]], at: int) -> float:
    return max(abs(error[at]) for error in errors)


def _median(errors: list[tuple[float, float]]) -> float:
    return statistics.median(abs(error[1]) for error in errors)


@pytest.mark.parametrize("case", [*HELD, *HELD_DRAWN], ids=str)
def test_activations_are_within_1_percent_and_the_peak_within_2(case):
    activations, peak = compared(case).errors
    assert abs(activations) <= 0.01
    assert abs(peak) <= 0.02


def test_the_grid_has_300_cases_and_half_of_its_peaks_are_within_1_percent():
    print("\n" + table(HELD))
    assert len(set(HELD)) >= 300
    assert _median([compared(case).errors for case in HELD]) <= 0.01


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_has_no_ledger_is_refused_by_name(case):
    with pytest.raises(InputError, match="peft adapts the experts"):
        train(from_config(load_config(case.model), case.model), TrainingPlan(**options_of(case)))


def test_a_sample_drawn_outside_the_grid_holds_too():
    print(f"\nsample of seed {SEED}\n" + table(HELD_DRAWN))
    assert not set(DRAWN) & set(GRID)
    assert _median([compared(case).errors for case in HELD_DRAWN]) <= 0.01
