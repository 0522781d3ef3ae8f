"""What a run is asked to do, checked at the door."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from measure.devices import DEVICE_FORM
from measure.distributed import JOBS
from measure.setting import SIZES
from measure.workloads import SUITES, WORKLOADS


def _known_workload(name: str) -> str:
    if name not in (*WORKLOADS, *SUITES):
        raise ValueError(f"it must be one of {', '.join((*WORKLOADS, *SUITES))}")
    return name


def _known_size(name: str) -> str:
    if name not in SIZES:
        raise ValueError(f"it must be one of {', '.join(SIZES)}")
    return name


def _device_form(name: str) -> str:
    if not DEVICE_FORM.fullmatch(name):
        raise ValueError("it must be auto, cpu, cuda or cuda:N (ROCm devices go by cuda too)")
    return name


class RunOptions(BaseModel):
    """One run of one workload, or of a suite of them. Time in seconds from having the device; memory as a share of what is
    free at the start."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    workload: Annotated[str, AfterValidator(_known_workload)]
    device: Annotated[str, AfterValidator(_device_form)] = Field("auto", description="auto, cpu, cuda or cuda:N")
    size: Annotated[str, AfterValidator(_known_size)] = Field(
        "small", description="how large a model or tensor; rates on a GPU take medium always"
    )
    model: str = Field("", max_length=500, description="MODEL, for workloads that take one; left out: a small Llama")
    seconds: float = Field(120.0, ge=1, le=3600, description="time limit, from having the device")
    ranks: int = Field(
        0, ge=0, le=16, description="devices of a workload that takes several; 0: every GPU, or 2 processes"
    )
    memory_fraction: float = Field(0.8, ge=0.05, le=1, description="share of the device's memory that the run may take")

    @property
    def workloads(self) -> tuple[str, ...]:
        """The workloads to run, in order."""
        return SUITES.get(self.workload, (self.workload,))

    @model_validator(mode="after")
    def _model_is_taken(self) -> Self:
        takers = [name for name, each in WORKLOADS.items() if each.takes_model]
        if self.model and not set(self.workloads) & set(takers):
            raise ValueError(f"model ({self.model}) is not for {self.workload}: {', '.join(takers)} take one")
        if self.model == "-":
            raise ValueError("model: '-' is not allowed; a run has no standard input: give a name or a path")
        return self

    @model_validator(mode="after")
    def _ranks_are_taken(self) -> Self:
        if self.ranks == 1:
            raise ValueError("ranks: 1 is not allowed; it must be 2 or more, or 0 for every GPU or 2 processes")
        if self.ranks and not set(self.workloads) & set(JOBS):
            raise ValueError(f"ranks ({self.ranks}) is not for {self.workload}: {', '.join(JOBS)} take several")
        return self
