"""Operations that memory bounds, each as torch runs it and as one Triton kernel: bytes that it must move, over its time.

On a CPU torch's programs are timed alone. Triton's, and all readings on a GPU, have not run on one yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from calc.measurements.records import Measured
from measure.setting import Setting
from measure.timing import time_call
from measure.workloads.cases import Case, each, timed_size
from measure.workloads.kernel_rows import bandwidth_row, intensity_row, sheet_roofs, time_row, with_triton
from measure.workloads.quantisation import NF4

Call = Callable[[], object]

# rows and columns in bf16: 128 MiB on a GPU, well above its last cache
_SHAPES: Final = {"small": (256, 1024), "medium": (8192, 8192)}
_TOKENS: Final = 16  # rows of the activations that meet quantised weights, as in decoding
_HEAD, _GROUP, _BLOCK = 128, 128, 64  # elements of a head; weights that share a scale in int4, and in NF4


class Operation(NamedTuple):
    """FLOPs and the least bytes of one call, and what calls it: torch's program; Triton's, None where it has no GPU."""

    name: str
    flops: int
    nbytes: int
    torch: Call
    triton: Call | None


@dataclass(frozen=True, slots=True)
class Given:
    """What an operation is made on: a matrix of so many rows and columns, and whether Triton's kernels run there."""

    device: torch.device
    rows: int
    columns: int
    with_triton: bool

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normal random numbers, a matrix of the given size unless told otherwise."""
        return torch.randn(shape or (self.rows, self.columns), device=self.device).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, shape, device=self.device, dtype=dtype)

    def kernel(self, module: str, name: str, *arguments: Any, **named: Any) -> Call | None:
        """The launcher of kernels.MODULE on its arguments."""
        if not self.with_triton:
            return None
        return partial(getattr(import_module(f"kernels.{module}"), name), *arguments, **named)


def run(setting: Setting) -> Iterator[Measured]:
    """`time/...`, `bandwidth/...` and `intensity/...` of each operation, by torch and by Triton."""
    setting = timed_size(setting)
    rows, columns = _SHAPES[setting.size]
    return each(setting, [Case(f"{rows}×{columns}", partial(_timed, setting, make)) for make in OPERATIONS])


def _timed(setting: Setting, make: Callable[[Given], Operation], divisor: int) -> Iterator[Measured]:
    torch.manual_seed(0)
    rows, columns = _SHAPES[setting.size]
    device = torch.device(setting.device.name)
    operation = make(Given(device, rows // divisor, columns, with_triton(setting.device)))
    roof = sheet_roofs(setting.device, torch.bfloat16).bandwidth
    for program, call in (("torch", operation.torch), ("triton", operation.triton)):
        if call:
            name, times = f"{operation.name}/{program}", time_call(call, device, seconds=0.1)
            yield time_row(name, times, None)
            yield bandwidth_row(name, times, operation.nbytes, roof)
            yield intensity_row(name, operation.flops, operation.nbytes)


def softmax(given: Given) -> Operation:
    x = given.normal()
    kernel = given.kernel("softmax", "softmax", x)
    return Operation("softmax", 5 * x.numel(), 2 * x.nbytes, partial(torch.softmax, x, -1), kernel)


def rms_norm(given: Given) -> Operation:
    x, weight = given.normal(), given.normal(given.columns)
    plain = partial(functional.rms_norm, x, (given.columns,), weight, 1e-6)
    kernel = given.kernel("rms_norm", "rms_norm", x, weight)
    return Operation("RMSNorm", 4 * x.numel(), 2 * x.nbytes + weight.nbytes, plain, kernel)


def layer_norm(given: Given) -> Operation:
    x, weight, bias = given.normal(), given.normal(given.columns), given.normal(given.columns)
    plain = partial(functional.layer_norm, x, (given.columns,), weight, bias)
    kernel = given.kernel("layer_norm", "layer_norm", x, weight, bias)
    return Operation("LayerNorm", 8 * x.numel(), 2 * x.nbytes + 2 * weight.nbytes, plain, kernel)


def swiglu(given: Given) -> Operation:
    gate, up = given.normal(), given.normal()
    kernel = given.kernel("swiglu", "swiglu", gate, up)
    return Operation("SwiGLU", 6 * gate.numel(), 3 * gate.nbytes, lambda: functional.silu(gate) * up, kernel)


def rope(given: Given) -> Operation:
    x = given.normal(1, given.columns // _HEAD, given.rows, _HEAD)
    angles = given.normal(given.rows, _HEAD // 2, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    kernel = given.kernel("rope", "rope", x, cos, sin)
    nbytes = 2 * x.nbytes + cos.nbytes + sin.nbytes
    return Operation("RoPE", 3 * x.numel(), nbytes, partial(_turned, x, cos, sin), kernel)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions as transformers computes them."""
    cos, sin = (torch.cat([angle, angle], -1).to(x.dtype) for angle in (cos, sin))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def cross_entropy(given: Given) -> Operation:
    """The loss and its gradient: the logits read once, the gradient written."""
    logits = given.normal()
    target = given.integers(0, given.columns, given.rows, dtype=torch.int64)
    leaf = logits.detach().requires_grad_()

    def plain() -> object:
        return torch.autograd.grad(functional.cross_entropy(leaf.float(), target), leaf)

    kernel = given.kernel("cross_entropy", "loss_and_gradient", logits, target)
    return Operation("cross-entropy", 8 * logits.numel(), 2 * logits.nbytes, plain, kernel)


def adamw(given: Given) -> Operation:
    """A step in fp32: the gradient read, the weight and both moments read and written."""
    param, grad, first, second = (given.normal(dtype=torch.float32) for _ in range(4))
    own = param.clone().requires_grad_()
    own.grad = grad
    optimizer = torch.optim.AdamW([own], fused=True)
    kernel = given.kernel("adamw", "adamw", param, grad, first, second.square_(), step=1)
    return Operation("AdamW", 14 * param.numel(), 7 * param.nbytes, optimizer.step, kernel)


def to_int8(given: Given) -> Operation:
    x = given.normal()
    kernel = given.kernel("quantize_int8", "quantize_int8", x)
    nbytes = x.nbytes + x.numel() + 4 * given.rows
    return Operation("absmax int8", 3 * x.numel(), nbytes, partial(_int8, x), kernel)


def _int8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(1, keepdim=True).float() / 127
    return (x / scale).round().to(torch.int8), scale


def from_nf4(given: Given) -> Operation:
    n = given.rows * given.columns
    packed = given.integers(0, 256, n // 2, dtype=torch.uint8)
    absmax = given.normal(n // _BLOCK, dtype=torch.float32).abs()
    levels = torch.tensor(NF4, dtype=torch.bfloat16, device=given.device)

    def plain() -> Tensor:
        numbers = torch.stack([packed // 16, packed % 16], -1).flatten().int()
        values = levels[numbers].view(-1, _BLOCK) * absmax[:, None]
        return values.to(torch.bfloat16).view(given.rows, given.columns)

    kernel = None
    if given.with_triton:
        made = import_module("kernels.quantize_nf4")
        weights = made.Nf4(packed, absmax, None, None, (given.rows, given.columns), torch.bfloat16)
        kernel = partial(made.dequantize_nf4, weights)
    return Operation("NF4 to bf16", n, packed.nbytes + absmax.nbytes + 2 * n, plain, kernel)


def int8_weights(given: Given) -> Operation:
    n = given.columns
    x, weight = given.normal(_TOKENS, n), given.integers(-127, 128, n, n, dtype=torch.int8)
    scale = given.normal(n, dtype=torch.float32).abs()

    def plain() -> Tensor:
        return x @ (weight * scale[:, None]).to(x.dtype).t()

    kernel = given.kernel("int8_matmul", "int8_matmul", x, weight, scale)
    nbytes = 2 * x.nbytes + weight.nbytes + scale.nbytes
    return Operation("int8 weights", 2 * _TOKENS * n * n, nbytes, plain, kernel)


def int4_weights(given: Given) -> Operation:
    n = given.columns
    x, packed = given.normal(_TOKENS, n), given.integers(0, 256, n, n // 2, dtype=torch.uint8)
    scale = given.normal(n, n // _GROUP, dtype=torch.float32).abs()

    def plain() -> Tensor:
        numbers = torch.stack([packed % 16, packed // 16], -1).view(n, n // _GROUP, _GROUP).to(torch.int8) - 8
        return x @ (numbers * scale[..., None]).to(x.dtype).view(n, n).t()

    kernel = given.kernel("int4_matmul", "int4_matmul", x, packed, scale)
    nbytes = 2 * x.nbytes + packed.nbytes + scale.nbytes
    return Operation("int4 weights", 2 * _TOKENS * n * n, nbytes, plain, kernel)


OPERATIONS: Final = (
    softmax,
    rms_norm,
    layer_norm,
    swiglu,
    rope,
    cross_entropy,
    adamw,
    to_int8,
    from_nf4,
    int8_weights,
    int4_weights,
)
