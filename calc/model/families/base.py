"""What a family is: the class it mirrors, and the function that reads its config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from calc.model.fields import Fields
from calc.model.spec import ModelSpec

_TRANSFORMERS = "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models"


@dataclass(frozen=True, slots=True)
class Family:
    """`read` builds the spec from a config's fields; `module` is the transformers module that it mirrors, or a full URL."""

    read: Callable[[Fields], ModelSpec]
    module: str

    @property
    def source(self) -> str:
        if "/" in self.module:
            return self.module
        return f"transformers 5.24, models/{self.module}/modeling_{self.module}.py"

    @property
    def url(self) -> str:
        return self.module if "/" in self.module else f"{_TRANSFORMERS}/{self.module}/modeling_{self.module}.py"
