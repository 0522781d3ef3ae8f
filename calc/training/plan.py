"""How a model is trained: the fields of a plan with the rules between them."""

from __future__ import annotations

from typing import Any, Self

from pydantic import model_validator

from calc.training.plan_fields import PlanFields
from calc.training.plan_rules import broken

# What the flags allow and is not modelled yet: refused by name, never ignored.
NOT_MODELLED = {
    "objective": {"ppo"},
}


class TrainingPlan(PlanFields):
    """One training step of one model, as `python -m calc train` describes it.

    `dp` counts all data-parallel ranks; `dp_replicate` of them hold equal shards (HSDP), so that ZeRO shards over
    dp · cp / dp_replicate. `ep` lies inside dp · cp. A device sees `seq / cp` tokens of each sequence.
    """

    @model_validator(mode="before")
    @classmethod
    def _engine(cls, values: Any) -> Any:
        """16-bit weights with fp32 shards under ZeRO are DeepSpeed's program, unless another is named."""
        if not isinstance(values, dict) or "implementation" in values or values.get("recipe") != "mixed-16":
            return values
        ranked = any(str(values.get(name, 1)) != "1" for name in ("tp", "pp", "cp", "ep", "dp_replicate"))
        plain = values.get("optimizer", "adamw") in ("adamw", "lion") and values.get("objective", "pretrain") in (
            "pretrain",
            "sft",
        )
        plain = plain and values.get("method", "full") != "dora" and values.get("loss") in (None, "full", "chunked")
        sharded = str(values.get("zero", 0)) in ("1", "2", "3")
        return values | {"implementation": "deepspeed"} if sharded and plain and not ranked else values

    @model_validator(mode="after")
    def _rules(self) -> Self:
        for field, names in NOT_MODELLED.items():
            if getattr(self, field) in names:
                raise ValueError(f"{field}: {getattr(self, field)!r} is not modelled yet")
        for problem in broken(self):
            raise ValueError(problem)
        return self
