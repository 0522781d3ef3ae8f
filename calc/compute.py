"""FLOPs of training, and from them time, GPU-hours, cost and energy, by both attention conventions with 6ND."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from calc.breakdown import Breakdown, Component
from calc.flops import TokenFlops, encoders, token_flops
from calc.hardware import Gpu
from calc.model.spec import ModelSpec, Tower
from calc.parameters import parameters, tower_parameters
from calc.quantities import left_out, whole_number


class ComputePlan(BaseModel):
    """How long to train, on how many GPUs, and how well they are used."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seq: int = Field(4096, ge=1, le=2**24, description="sequence length in tokens")
    tokens: Annotated[int | None, BeforeValidator(left_out), BeforeValidator(whole_number)] = Field(
        None, ge=1, le=10**18, description="tokens to train on, such as 2e12 or 1T; left out: one sequence"
    )
    gpus: int = Field(1, ge=1, le=10_000_000, description="number of GPUs")
    dtype: Literal["bf16", "fp16", "fp8", "fp4", "tf32", "fp32"] = Field(
        "bf16", description="number format of the matmuls: whose dense peak counts"
    )
    mfu: float = Field(0.4, gt=0, le=1, description="model FLOPs utilisation, a share of the dense peak")
    gpu_hours: Annotated[float | None, BeforeValidator(left_out)] = Field(
        None, gt=0, le=1e12, description="GPU-hours that a run took: gives its MFU; left out: mfu is used"
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="recomputation in backward: attention scores, or whole layers"
    )
    price_per_gpu_hour: Annotated[float | None, BeforeValidator(left_out)] = Field(
        None, gt=0, le=1e6, description="price of a GPU-hour; left out: unknown"
    )
    power_utilization: float = Field(1.0, gt=0, le=1, description="power drawn, a share of the board power")
    pue: float = Field(1.1, ge=1, le=5, description="power usage effectiveness of the data centre (LLaMA paper: 1.1)")
    grid_intensity: float = Field(
        0.385, ge=0, le=2, description="kg of CO2 equivalent for a kWh (LLaMA paper: the US mean of 0.385)"
    )

    @property
    def idle(self) -> dict[str, str]:
        """Fields that change nothing with the others as they are, each with the reason."""
        return {"mfu": "gpu_hours gives it"} if self.gpu_hours else {}


# what recomputation repeats of one token's forward pass
_REPEATED: Mapping[str, str] = {"selective": "attention", "full": "layers"}


@dataclass(frozen=True, slots=True)
class Figures:
    """One convention's answer. FLOPs are exact; seconds, GPU-hours, cost (in the price's currency), kWh and kg are None
    where a fact is missing. `attention_flops_per_token` is forward. MFU leaves recomputation out, HFU counts it."""

    breakdown: Breakdown
    forward_flops_per_token: int
    training_flops_per_token: int
    attention_flops_per_token: int
    six_nd_flops: int
    training_flops: int
    hardware_flops: int
    seconds: float | None
    gpu_hours: float | None
    cost: float | None
    energy_kwh: float | None
    carbon_kg: float | None
    mfu: float | None
    hfu: float | None

    def as_json(self) -> dict[str, Any]:
        """The figures with the keys of the command line."""
        named = {name: getattr(self, name) for name in self.__slots__ if name != "breakdown"}
        return named | {"components": self.breakdown.components()}


@dataclass(frozen=True, slots=True)
class ComputeAnswer:
    """FLOPs by both conventions. `six_nd_mfu` is what the run's speed would be called by 6ND; `notes` say what is missing and why."""

    spec: ModelSpec
    plan: ComputePlan
    gpu: Gpu | None
    causal: Figures
    full: Figures
    active_parameters: int
    tokens: int
    six_nd_mfu: float | None
    notes: tuple[str, ...]

    @property
    def breakdown(self) -> Breakdown:
        """Training FLOPs by the causal convention, the one at the top level."""
        return self.causal.breakdown

    def as_json(self) -> dict[str, Any]:
        """The answer with the keys of `python -m calc compute`."""
        causal = self.causal.as_json()
        return {
            "model": self.spec.name,
            "gpu": self.gpu.name if self.gpu else None,
            "tokens": self.tokens,
            "active_parameters": self.active_parameters,
            **causal,
            "six_nd_mfu": self.six_nd_mfu,
            "causal": causal,
            "full": self.full.as_json(),
            "assumptions": list(self.spec.assumptions),
            "notes": list(self.notes),
        }


def compute(spec: ModelSpec, plan: ComputePlan, gpu: Gpu | None = None) -> ComputeAnswer:
    """FLOPs of training on `plan.tokens` tokens in sequences of `plan.seq`, and the time that they take.

    time = training FLOPs / (GPUs x dense peak x MFU); with `plan.gpu_hours` the time is given and the MFU is the answer. What
    needs a fact that nobody gave (no GPU, a peak that no source states, no price) is None, and a note says so.
    6ND counts N as every parameter that a text token uses, its embedding included.
    """
    spec.must_read_text()
    tokens = plan.tokens or plan.seq
    active = parameters(spec).active - sum(tower_parameters(tower) for tower in _unused_towers(spec))
    six_nd = 6 * active * tokens
    peak = gpu.peak_flops(plan.dtype) if gpu else None
    causal, full = (_figures(token_flops(spec, plan.seq, mask), plan, gpu, peak, six_nd) for mask in (True, False))
    rate = peak * plan.gpus if peak else None
    return ComputeAnswer(
        spec,
        plan,
        gpu,
        causal,
        full,
        active,
        tokens,
        six_nd / (rate * causal.seconds) if rate and causal.seconds else None,
        tuple(_notes(spec, plan, gpu, peak)),
    )


def _figures(one: TokenFlops, plan: ComputePlan, gpu: Gpu | None, peak: float | None, six_nd: int) -> Figures:
    tokens = plan.tokens or plan.seq
    tree = Component("training", children=one.parts, count=tokens)
    training = 3 * one.forward * tokens
    again: int = getattr(one, _REPEATED[plan.recompute]) if plan.recompute in _REPEATED else 0
    hardware = training + again * tokens
    rate = peak * plan.gpus if peak else None
    if plan.gpu_hours:
        seconds: float | None = plan.gpu_hours * 3600 / plan.gpus
        mfu = training / (rate * seconds) if rate and seconds else None
    else:
        seconds = training / (rate * plan.mfu) if rate else None
        mfu = plan.mfu
    hours = seconds * plan.gpus / 3600 if seconds is not None else None
    kwh = _energy_kwh(hours, gpu, plan)
    return Figures(
        breakdown=Breakdown(tree, "FLOPs"),
        forward_flops_per_token=one.forward,
        training_flops_per_token=3 * one.forward,
        attention_flops_per_token=one.attention,
        six_nd_flops=six_nd,
        training_flops=training,
        hardware_flops=hardware,
        seconds=seconds,
        gpu_hours=hours,
        cost=hours * plan.price_per_gpu_hour if hours is not None and plan.price_per_gpu_hour else None,
        energy_kwh=kwh,
        carbon_kg=kwh * plan.grid_intensity if kwh is not None else None,
        mfu=mfu,
        hfu=mfu * hardware / training if mfu is not None else None,
    )


def _energy_kwh(hours: float | None, gpu: Gpu | None, plan: ComputePlan) -> float | None:
    """GPU-hours x board power x share drawn x PUE (LLaMA, arXiv 2302.13971, section 6)."""
    if hours is None or gpu is None or gpu.board_power is None:
        return None
    return hours * gpu.board_power / 1000 * plan.power_utilization * plan.pue


def _unused_towers(spec: ModelSpec) -> tuple[Tower, ...]:
    """The towers that text tokens do not pass: vision and audio encoders."""
    read = encoders(spec)
    return tuple(tower for tower in spec.towers if tower.in_total and tower not in read)


def _notes(spec: ModelSpec, plan: ComputePlan, gpu: Gpu | None, peak: float | None) -> list[str]:
    """What the reader must know: facts that are missing, and what the count leaves out."""
    notes = []
    if gpu is None:
        notes.append("no GPU chosen: time, GPU-hours, cost and energy are left out")
    elif peak is None:
        notes.append(gpu.why_no_peak(plan.dtype))
    if gpu is not None and gpu.board_power is None:
        notes.append(f"no source gives the board power of {gpu.name}: energy is left out")
    notes += spec.beyond_positions("seq", plan.seq)
    unused = [tower.name for tower in _unused_towers(spec)]
    if encoders(spec):
        notes.append("encoder and decoder each read so many tokens")
    if unused:
        notes.append(
            f"FLOPs and active parameters are those of a text token, which does not run {' or '.join(unused)}: "
            "params counts these as active too"
        )
    if plan.recompute == "selective":
        notes.append(
            "selective repeats the attention scores; fused attention does so by itself and gains nothing from it"
        )
    return notes
