"""One training step, observed: by torch's allocator on a GPU, by the trace (fake tensors, CUDA's choices) where there is none.

The allocator's part has not run on a GPU yet; a test runs it on the CPU with readings of its own.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from calc.measurements.records import Measured
from calc.training import TrainingAnswer, TrainingPlan
from calc.training.states.sharding import GRANULE
from calc.units import round_up
from measure.devices import Device
from measure.trace import TraceOptions, trace_step
from measure.trace.cuda import no_packed_masks
from measure.trace.model import build, quiet
from measure.trace.optimizers import make_optimizer

STATES: Final = ("parameters", "gradients", "optimizer")
PEAKS: Final = ("forward", "backward", "step")


class Step(NamedTuple):
    """Bytes of one step as `train` names them: states, what forward leaves, and the highest point of each phase."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    forward: int
    backward: int
    step: int


class Meter(Protocol):
    """Bytes that the allocator has given out: now, and at most since the last `reset`."""

    def held(self) -> int: ...

    def peak(self) -> int: ...

    def reset(self) -> None: ...


class CudaMeter:
    """torch's allocator on a GPU. Not run on one yet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def held(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def predicted_step(answer: TrainingAnswer) -> Step:
    """The step as calc predicts it."""
    states = (answer.parameters_bytes, answer.gradients_bytes, answer.optimizer_bytes)
    return Step(*states, answer.activations_bytes, *(answer.phases[phase] for phase in PEAKS))


def observed_step(config: Mapping[str, Any], plan: TrainingPlan, device: Device) -> Step:
    """The step as the real program does it. InputError when it cannot be built or run."""
    options = options_of(plan)
    if device.kind == "cpu":
        found = trace_step(config, options)
        states = (found.parameters_bytes, found.gradients_bytes, found.optimizer_bytes)
        return Step(*states, found.activations_bytes, *(found.phases[phase] for phase in PEAKS))
    where = torch.device(device.name)
    return metered_step(config, options, where, CudaMeter(where))


def options_of(plan: TrainingPlan) -> TraceOptions:
    """The same step as the trace and the real program take it."""
    names = ("seq", "micro_batch", "recipe", "optimizer", "optimizer_kernel", "recompute", "attention", "dropout")
    shared = {name: getattr(plan, name) for name in (*names, "method", "lora_rank", "lora_targets")}
    return TraceOptions(**shared, accumulation=plan.microbatches)


def metered_step(config: Mapping[str, Any], options: TraceOptions, device: torch.device, meter: Meter) -> Step:
    """The second step of the real program on real memory, between readings of a meter.

    What the meter holds beyond the known tensors after the first step is the workspace of the matmuls: it is not the step's.
    """
    program = Program(config, options, device)
    program.forward().backward()  # type: ignore[no-untyped-call]
    program.optimizer.step()
    program.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    workspace = meter.held() - stored(program.tensors())
    readings = []
    for phase in PEAKS:
        meter.reset()
        if phase == "forward":
            loss = program.forward()
            after_forward = meter.held() - workspace
        elif phase == "backward":
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            gradients = stored(p.grad for p in program.model.parameters() if p.grad is not None)
            program.optimizer.step()
        readings.append(meter.peak() - workspace)
    parameters, optimizer = stored(program.model.parameters()), stored(program.moments())
    return Step(parameters, gradients, optimizer, after_forward - parameters - optimizer, *readings)


def stored(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind the tensors, each once, rounded up as the allocator does."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(round_up(nbytes, GRANULE) for nbytes in storages.values())


class Program:
    """A real model on real memory, with its optimizer and one batch: labels are the inputs, no mask, no cache."""

    def __init__(self, config: Mapping[str, Any], options: TraceOptions, device: torch.device) -> None:
        torch.manual_seed(0)
        self._options = options
        with quiet():
            self.model: nn.Module = build(config, options, device)
        vocabulary = self.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        self.tokens = torch.randint(0, vocabulary, (options.micro_batch, options.seq), device=device)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(options.optimizer, options.optimizer_kernel, trained)

    def forward(self) -> Tensor:
        """The loss, and nothing else kept."""
        cast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._options.recipe == "amp":
            cast = torch.autocast(self.tokens.device.type, torch.bfloat16)
        unseen: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.tokens.is_meta:  # positions without values cannot be looked at
            unseen = no_packed_masks()
        with cast, unseen:
            loss: Tensor = self.model(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss
        return loss

    def train(self) -> None:
        """Forward and backward, without the optimizer's step."""
        self.model.zero_grad(set_to_none=True)
        self.forward().backward()  # type: ignore[no-untyped-call]

    def moments(self) -> Iterator[Tensor]:
        """The optimizer's tensors on the device."""
        for state in self.optimizer.state.values():
            yield from (
                value for value in state.values() if isinstance(value, Tensor) and value.device == self.tokens.device
            )

    def tensors(self) -> Iterator[Tensor]:
        """All that is known to stay between steps."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from self.moments()
        yield self.tokens


def quantity(name: str) -> str:
    """A row's name for a figure of a step: `states/parameters`, `activations`, `peak/forward`."""
    groups = dict.fromkeys(STATES, "states/") | dict.fromkeys(PEAKS, "peak/")
    return groups.get(name, "") + name


def step_rows(predicted: Step, observed: Step, names: Iterable[str] = Step._fields) -> Iterator[Measured]:
    """Predicted against measured, figure by figure."""
    for name in names:
        yield Measured("", quantity(name), getattr(predicted, name), getattr(observed, name), "bytes")
