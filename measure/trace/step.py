"""The real training step, run with fake tensors under the recorder."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from measure.trace.model import Stack, materialize
from measure.trace.optimizers import make_optimizer, state_of
from measure.trace.options import TraceOptions
from measure.trace.quantised import quantised_parts
from measure.trace.recorder import Event, Place, Recorder, Storage
from measure.trace.sharding import gathered_parameters, process_group, shard


@dataclass(slots=True)
class Observed:
    """What one recorded step left: its events, and the storages alive before it, at the end of forward and of backward."""

    events: list[Event] = field(default_factory=list)
    before: list[Storage] = field(default_factory=list)
    after_forward: list[Storage] = field(default_factory=list)
    after_backward: list[Storage] = field(default_factory=list)


def places(model: nn.Module, stack: Stack) -> dict[int, Place]:
    """Each module's decoder layer and path, by id. Paths inside a layer leave its name out."""
    known: dict[int, Place] = {}
    prefix = f"{stack.path}."
    for name, module in model.named_modules():
        if stack.path and name.startswith(prefix):
            position, _, inner = name.removeprefix(prefix).partition(".")
            known[id(module)] = (stack.run[int(position)], inner)
        else:
            known[id(module)] = (None, name)
    return known


def run_steps(model: nn.Module, stack: Stack, options: TraceOptions) -> Observed:
    """Two steps of the model under the recorder: what the second left."""
    recorder = Recorder(places(model, stack), options.rounding, options.optimizer_kernel == "foreach")
    ranks = process_group(options.dp) if options.zero else contextlib.nullcontext()
    with ranks as mesh, FakeTensorMode(), recorder, recorder.modules(), recorder.saves(), recorder.resizes():
        materialize(model)
        if mesh and options.zero == 3:
            shard(model, stack, mesh, options)
        owners = _mark_states(recorder, model)
        tokens = torch.zeros((options.micro_batch, options.seq), dtype=torch.int64)
        recorder.mark(tokens, "inputs", name="input_ids")
        trained = [parameter for parameter in owners if parameter.requires_grad]
        optimizer = make_optimizer(options.optimizer, options.optimizer_kernel, trained, options.zero == 1)
        for _ in range(2):
            seen = _step(recorder, model, tokens, optimizer, owners, options)
    return seen


def _mark_states(recorder: Recorder, model: nn.Module) -> dict[nn.Parameter, tuple[Place, str]]:
    """Mark parameters and buffers; returns each parameter's place and name."""
    owners: dict[nn.Parameter, tuple[Place, str]] = {}
    for module in model.modules():
        place = recorder.places.get(id(module), (None, ""))
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in owners:
                owners[parameter] = (place, name)
                recorder.mark(parameter, "parameters", place, name)
        for name, buffer in module.named_buffers(recurse=False):
            recorder.mark(buffer, "buffers", place, name)
    for module, name, tensor in quantised_parts(model):
        recorder.mark(tensor, "parameters", recorder.places.get(id(module), (None, "")), name)
    return owners


def _step(
    recorder: Recorder,
    model: nn.Module,
    tokens: Tensor,
    optimizer: torch.optim.Optimizer,
    owners: Mapping[nn.Parameter, tuple[Place, str]],
    options: TraceOptions,
) -> Observed:
    recorder.begin("zero_grad")
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    seen = Observed(before=recorder.live())
    start = len(recorder.events)
    for micro in range(min(options.accumulation, 2)):  # every micro-batch after the second is like the second
        recorder.begin(f"forward {micro}")
        loss = _forward(model, tokens, options)
        for module, name, whole in gathered_parameters(model):
            recorder.mark(whole, "gathered", recorder.places.get(id(module), (None, "")), name)
        seen.after_forward = recorder.live()
        for storage in seen.after_forward:
            storage.category = storage.category or "activations"
        recorder.begin(f"backward {micro}")
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter, (place, name) in owners.items():
            if parameter.grad is not None:
                recorder.mark(
                    parameter.grad, "gradients", *(((place[0], ""), "sharded") if options.zero == 3 else (place, name))
                )
    seen.after_backward = recorder.live()
    recorder.begin("step")
    optimizer.step()
    _mark_optimizer(recorder, optimizer, owners, options)
    seen.events = recorder.events[start:]
    return seen


def _forward(model: nn.Module, tokens: Tensor, options: TraceOptions) -> Tensor:
    """The loss, and nothing else kept."""
    cast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if options.recipe == "amp":
        cast = torch.autocast("cpu", dtype=torch.bfloat16)
    with cast:
        loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss / options.accumulation if options.accumulation > 1 else loss


def _mark_optimizer(
    recorder: Recorder,
    optimizer: torch.optim.Optimizer,
    owners: Mapping[nn.Parameter, tuple[Place, str]],
    options: TraceOptions,
) -> None:
    """Name the optimizer's tensors; step counters that live on the host count nothing."""
    for parameter, state in state_of(optimizer).items():
        place, owner = owners[parameter]
        for name, value in state.items():
            if isinstance(value, Tensor):
                host = name == "step" and options.optimizer_kernel != "fused"
                recorder.mark(value, "host" if host else "optimizer", place, f"{owner}/{name}")
