"""The answer of `train` with what helps to go on: changes that make it fit, how far it goes, what a checkpoint takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from calc.breakdown import Breakdown
from calc.hardware import Gpu
from calc.model.spec import ModelSpec
from calc.training.advice.checkpoint import Checkpoint, checkpoint
from calc.training.advice.fit import Change, changes_that_fit
from calc.training.advice.largest import largest
from calc.training.answer import TrainingAnswer, train
from calc.training.plan import TrainingPlan


@dataclass(frozen=True, eq=False)
class Suggested:
    """`fixes` is empty when the step fits. The largest values are 0 when none fits, None when the memory is unknown."""

    answer: TrainingAnswer
    fixes: tuple[Change, ...]
    largest_micro_batch: int | None
    largest_seq: int | None
    checkpoint: Checkpoint

    @property
    def breakdown(self) -> Breakdown:
        """That of the answer."""
        return self.answer.breakdown

    def as_json(self) -> dict[str, Any]:
        """The keys of `python -m calc train`, and those that `--suggest` adds."""
        return {
            **self.answer.as_json(),
            "fixes": [change.as_json() for change in self.fixes],
            "largest_micro_batch": self.largest_micro_batch,
            "largest_seq": self.largest_seq,
            "checkpoint_bytes": self.checkpoint.bytes,
            "checkpoint_weights_bytes": self.checkpoint.weights_bytes,
            "checkpoint_host_bytes": self.checkpoint.host_bytes,
            "checkpoint": self.checkpoint.as_json(),
        }


def suggest(answer: TrainingAnswer) -> Suggested:
    """What helps to go on from an answer."""
    spec, plan, gpu = answer.spec, answer.plan, answer.gpu
    return Suggested(
        answer,
        changes_that_fit(spec, plan, gpu),
        largest(spec, plan, gpu, "micro_batch"),
        largest(spec, plan, gpu, "seq"),
        checkpoint(spec, plan),
    )


def train_and_suggest(spec: ModelSpec, plan: TrainingPlan, gpu: Gpu | None = None) -> Suggested:
    """`train` and `suggest`, as one question of the command line."""
    return suggest(train(spec, plan, gpu))
