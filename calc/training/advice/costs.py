"""What a change of the plan costs: one number by a sourced formula where there is one, and a line that says the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from calc.breakdown import Formula, Number
from calc.flops import token_flops
from calc.model.spec import ModelSpec
from calc.training.plan import TrainingPlan

_OPTIMIZERS: Final = {
    "adamw-8bit": "moments in 8 bits with a scale for each block of 256 (arXiv 2110.02861)",
    "adafactor": "second moments factored, no first moment (arXiv 1804.04235): tune the learning rate again",
    "sgd": "no moments at all: tune the learning rate again",
}
_BUBBLES = ("1f1b", "gpipe", "interleaved")  # whose bubble the paper gives


@dataclass(frozen=True, slots=True)
class Cost:
    """`text` says it; `ratio` is the `quantity` (FLOPs, communication, ...) after the change over that before, by `formula`."""

    text: str
    quantity: str = ""
    ratio: float | None = None
    formula: Formula | None = None
    numbers: Mapping[str, Number] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The cost as a row of JSON; formula and source are "" where there is no number."""
        known = self.formula
        return {
            "text": self.text,
            "quantity": self.quantity,
            "ratio": self.ratio,
            "formula": known.symbolic() if known else "",
            "with_numbers": known.with_numbers(self.numbers) if known else "",
            "source": known.source if known else "",
            "url": known.url if known else "",
        }


def cost(changed: str, before: TrainingPlan, after: TrainingPlan, spec: ModelSpec) -> Cost:
    """What it costs to go from one plan to the other by the field `changed`."""
    return _COSTS[changed](before, after, spec)


Asked = Callable[[TrainingPlan, TrainingPlan, ModelSpec], Cost]

_FLOPS = "PaLM, arXiv 2204.02311, appendix B: one forward, and a backward of twice its FLOPs"
_NAMES = "f: forward FLOPs of a token; l: those of the layers, a: of attention's scores and values, o: of the head, all causal"


def _flops(text: str) -> Asked:
    def found(before: TrainingPlan, after: TrainingPlan, spec: ModelSpec) -> Cost:
        token = token_flops(spec, after.seq, True)
        letters = {"f": token.forward, "l": token.layers, "a": token.attention, "o": token.head}
        terms = [_terms(plan) for plan in (after, before)]
        amounts = [sum(times * letters[letter] for letter, times in each.items()) for each in terms]
        latex = rf"\frac{{{_latex(terms[0])}}}{{{_latex(terms[1])}}}"
        formula = Formula(latex, _FLOPS, "https://arxiv.org/abs/2204.02311", (_NAMES,))
        numbers = {letter: letters[letter] for letter in dict.fromkeys([*terms[0], *terms[1]])}
        return Cost(text, "FLOPs", amounts[0] / amounts[1], formula, numbers)

    return found


_AGAIN: Final = {"full": "l", "selective": "a"}


def _terms(plan: TrainingPlan) -> dict[str, int]:
    """FLOPs of a token under the plan, as multiples of letters.

    Adapters spare the frozen weights' gradients, f - a, but not those of the activations, nor of attention, which has no weights.
    """
    terms = {"f": 3} if plan.method == "full" else {"f": 2, "a": 1}
    again = _AGAIN.get(plan.recompute)
    if again:
        terms[again] = terms.get(again, 0) + 1
    if plan.head_loss == "chunked" and plan.implementation != "torchtitan":  # torchtitan's runs backward at once
        terms["o"] = 1
    return terms


def _latex(terms: Mapping[str, int]) -> str:
    return " + ".join(f"<{letter}>" if times == 1 else rf"{times} \cdot <{letter}>" for letter, times in terms.items())


_VOLUME = "ZeRO, arXiv 1910.02054, section 7: bytes that a rank moves, in units of the model's"


def _volume(plan: TrainingPlan) -> int:
    """All-reduce of the gradients, or their reduce-scatter and a gather of the weights for each pass that lacks them."""
    return 3 if plan.zero == 3 and plan.reshard_after_forward else 2


def _zero(before: TrainingPlan, after: TrainingPlan, spec: ModelSpec) -> Cost:
    more = _volume(after) > _volume(before)
    text = "weights are gathered in forward and in backward" if more else "as much communication as data parallelism"
    formula = Formula(r"\frac{<v_1>}{<v_0>}", _VOLUME, "https://arxiv.org/abs/1910.02054", ("of one micro-batch",))
    numbers = {"v_1": _volume(after), "v_0": _volume(before)}
    return Cost(text, "communication", _volume(after) / _volume(before), formula, numbers)


def _micro_batch(before: TrainingPlan, after: TrainingPlan, spec: ModelSpec) -> Cost:
    formula = Formula(r"\frac{<m_1>}{<m_0>}", "gradients of m micro-batches are added up before one optimizer step")
    numbers = {"m_1": after.microbatches, "m_0": before.microbatches}
    text = "the same tokens and FLOPs a step, in more and smaller matmuls"
    return Cost(text, "micro-batches a step", after.microbatches / before.microbatches, formula, numbers)


def _seq(before: TrainingPlan, after: TrainingPlan, spec: ModelSpec) -> Cost:
    formula = Formula(r"\frac{<s_1>}{<s_0>}", "a step reads global batch · s tokens")
    numbers = {"s_1": after.seq, "s_0": before.seq}
    return Cost("different training: shorter texts", "tokens a step", after.seq / before.seq, formula, numbers)


def _gpus(text: str) -> Asked:
    def found(before: TrainingPlan, after: TrainingPlan, spec: ModelSpec) -> Cost:
        if after.gpus == before.gpus:
            return Cost(text)
        formula = Formula(r"\frac{<n_1>}{<n_0>}", "GPUs: dp · tp · pp · cp")
        numbers = {"n_1": after.gpus, "n_0": before.gpus}
        return Cost(text, "GPUs", after.gpus / before.gpus, formula, numbers)

    return found


def _pipeline(before: TrainingPlan, after: TrainingPlan, spec: ModelSpec) -> Cost:
    formula = Formula(
        r"1 + \frac{<p> - 1}{<v> \cdot <m>}",
        "Megatron-LM, arXiv 2104.04473, section 2.2",
        "https://arxiv.org/abs/2104.04473",
        ("stages that take equally long, and transfers that take no time",),
    )
    numbers = {"p": after.pp, "v": after.virtual_stages, "m": after.microbatches}
    more = f"{after.gpus / before.gpus:g} times the GPUs, which wait for each other at both ends of a step"
    if after.schedule not in _BUBBLES:
        return Cost(more)
    return Cost(
        more,
        "time of a pipeline without bubbles",
        1 + (after.pp - 1) / (after.virtual_stages * after.microbatches),
        formula,
        numbers,
    )


def _optimizer(before: TrainingPlan, after: TrainingPlan, spec: ModelSpec) -> Cost:
    return Cost(f"different training: {_OPTIMIZERS[after.optimizer]}")


def _said(text: str) -> Asked:
    return lambda before, after, spec: Cost(text)


_COSTS: Final[dict[str, Asked]] = {
    "optimizer_kernel": _said("none: one kernel updates all tensors in place (PyTorch 2.13, torch.optim: fused)"),
    "loss": _flops("the head runs chunk by chunk: smaller matmuls"),
    "zero": _zero,
    "micro_batch": _micro_batch,
    "recompute": _flops("backward computes again what forward did not keep"),
    "offload": _said("weights and gradients cross PCIe in each step, and the host updates (ZeRO-Offload, arXiv 2101.06840)"),
    "optimizer": _optimizer,
    "recipe": _said("different training: no fp32 master weights, so that small updates are rounded away"),
    "method": _flops("different training: only adapters learn (LoRA, arXiv 2106.09685; 2305.14314); their own FLOPs are not counted"),
    "seq": _seq,
    "tp": _gpus("4 all-reduces of s·b·h a layer and micro-batch (Megatron-LM, arXiv 1909.08053, section 3)"),
    "dp": _gpus("more sequences a step unless the global batch is given; weights are gathered in forward and in backward"),
    "pp": _pipeline,
}  # fmt: skip
