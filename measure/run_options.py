"""What a run is asked to do, checked at the door."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from measure.devices import DEVICE_FORM
from measure.workloads import SIZES, WORKLOADS


def _known_workload(name: str) -> str:
    if name not in WORKLOADS:
        raise ValueError(f"it must be one of {', '.join(WORKLOADS)}")
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
    """One run of one workload. Time in seconds from having the device; memory as a share of what is free at the start."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    workload: Annotated[str, AfterValidator(_known_workload)]
    device: Annotated[str, AfterValidator(_device_form)] = Field("auto", description="auto, cpu, cuda or cuda:N")
    size: Annotated[str, AfterValidator(_known_size)] = Field("small", description="how large a model or tensor")
    seconds: float = Field(120.0, ge=1, le=3600, description="time limit, from having the device")
    memory_fraction: float = Field(0.8, ge=0.05, le=1, description="share of the device's memory that the run may take")
