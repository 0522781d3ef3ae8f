"""The optimizers that a trace can run: torch's own, by the names that people use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from calc.errors import InputError

# name, class in torch.optim, arguments beside the parameters
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


def make_optimizer(name: str, kernel: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer over those parameters. InputError when torch has no such optimizer or kernel."""
    if name not in OPTIMIZERS:
        raise InputError.of("optimizer", name, f"a trace runs torch's own: {', '.join(OPTIMIZERS)}")
    if kernel == "fused" and name not in FUSED:
        raise InputError.of("optimizer_kernel", kernel, f"torch has no fused {name}; it must be foreach or loop")
    kind, arguments = OPTIMIZERS[name]
    return getattr(torch.optim, kind)(parameters, lr=1e-3, **KERNELS[kernel], **arguments)  # type: ignore[no-any-return]
