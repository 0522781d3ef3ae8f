"""What the ranks are told to run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

FOLDER: Final = "plumbline-ranks-"  # how the name of a run's temporary folder begins


@dataclass(frozen=True, slots=True)
class Order:
    """Jobs to run one after the other, by name, and on what: `kind` of device, size, the file where the ranks of one machine meet
    ("" for torchrun's own address), and the share of a GPU's memory that a rank may take."""

    jobs: tuple[str, ...]
    kind: str
    size: str
    store: str = ""
    memory_fraction: float = 1.0

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        values = json.loads(text)
        return cls(**values | {"jobs": tuple(values["jobs"])})
