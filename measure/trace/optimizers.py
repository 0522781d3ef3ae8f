"""The optimizers that a trace can run: torch's own, by the names that people use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from calc.errors import InputError

# name, class in torch.optim, arguments besides the parameters
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "adam": ("Adam", {}),
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "adafactor": ("Adafactor", {}),
    "adagrad": ("Adagrad", {}),
    "adadelta": ("Adadelta", {}),
    "adamax": ("Adamax", {}),
    "asgd": ("ASGD", {}),
    "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}),
    "rmsprop": ("RMSprop", {}),
    "rprop": ("Rprop", {}),
}
KERNELS: dict[str, dict[str, bool]] = {
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
    "fused": {"fused": True},
}
FUSED = ("adamw", "adam", "sgd", "momentum", "adagrad")


def make_optimizer(
    name: str, kernel: str, parameters: Iterable[nn.Parameter], shared: bool = False
) -> torch.optim.Optimizer:
    """The optimizer over those parameters; `shared`: the ranks share its states out, tensor by tensor (ZeRO-1).

    InputError when torch has no such optimizer or kernel.
    """
    if name not in OPTIMIZERS:
        raise InputError.of("optimizer", name, f"a trace runs torch's own: {', '.join(OPTIMIZERS)}")
    if kernel == "fused" and name not in FUSED:
        raise InputError.of("optimizer_kernel", kernel, f"torch has no fused {name}; it must be foreach or loop")
    kind, extra = OPTIMIZERS[name]
    arguments = {"lr": 1e-3, **KERNELS[kernel], **extra}
    if not shared:
        return getattr(torch.optim, kind)(parameters, **arguments)  # type: ignore[no-any-return]
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, optimizer_class=getattr(torch.optim, kind), **arguments)


def state_of(optimizer: Any) -> Mapping[Any, Mapping[str, Any]]:
    """What the optimizer keeps on this rank for each parameter."""
    held: Mapping[Any, Mapping[str, Any]] = getattr(optimizer, "optim", optimizer).state
    return held
