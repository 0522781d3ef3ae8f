"""Programs of the tests under fake tensors: TRL's steps and peft's adapters, as recorded or run again."""

from __future__ import annotations

from typing import Any

from tests.recorded.recording import Recording

TRL = Recording("trl", ("tests.measure.trl_program",), ("torch", "transformers", "peft"), again=0)
PEFT = Recording("peft", ("tests.measure.peft_program",), ("torch", "transformers", "peft"), again=1)


def trl_peaks(objective: str, config: dict[str, Any], *given: Any, **options: Any) -> dict[str, int]:
    """The highest point of each phase of a DPO or GRPO step: `run_dpo` or `run_grpo` of the program."""

    def run() -> dict[str, int]:
        from tests.measure import trl_program

        found: dict[str, int] = getattr(trl_program, f"run_{objective}")(config, *given, **options)
        return found

    inputs = {"config": config, "given": given, "options": options}
    key = f"{objective} {config['hidden_size']} {_key({'given': given, 'options': options})}"
    peaks: dict[str, int] = TRL.result(key, inputs, run, objective)
    return peaks


def peft_step(config: dict[str, Any], options: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
    """The bytes of a step of a model with peft's adapters."""

    def run() -> dict[str, Any]:
        from tests.measure.peft_program import run

        return run(config, options, chosen)

    inputs = {"config": config, "options": options, "chosen": chosen}
    seen: dict[str, Any] = PEFT.result(_key({**options, **chosen}), inputs, run)
    return seen


def _key(values: Any) -> str:
    """Values as one line."""
    if isinstance(values, dict):
        return " ".join(f"{name}={_key(value)}" for name, value in values.items() if value is not None)
    return ",".join(map(_key, values)) if isinstance(values, list | tuple) else str(values)
