"""Standard attention against flash: what each keeps for backward, and its time, as the sequence grows.

On any device the kept bytes are counted by storage, as autograd packs them; on a GPU the allocator's peak and Triton's kernel stand
too (that part has not run on a GPU yet).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from calc.measurements.records import Measured
from kernels.standard_attention import standard_attention
from measure.setting import Setting
from measure.timing import time_call
from measure.workloads.cases import Case, each, timed_size
from measure.workloads.kernel_rows import intensity_row, measured_roofs, rate_row, sheet_roofs, time_row, with_triton

# sequences, heads, head size
_SIZES: Final = {"small": ((128, 256, 512), 4, 64), "medium": ((1024, 2048, 4096, 8192), 16, 128)}
_DTYPE: Final = torch.bfloat16

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def run(setting: Setting) -> Iterator[Measured]:
    """For each s: `kept/...`, `time/...`, `rate/...` of both, forward and backward, without a mask; on a GPU `peak/...` too."""
    setting = timed_size(setting)
    lengths, heads, head = _SIZES[setting.size]
    cases = [Case(f"s = {s}", lambda divisor, s=s: _at(setting, s // divisor, heads, head)) for s in lengths]  # type: ignore[misc]
    return each(setting, cases)


def _at(setting: Setting, s: int, heads: int, head: int) -> Iterator[Measured]:
    device = torch.device(setting.device.name)
    torch.manual_seed(0)
    qkv = [torch.randn(1, heads, s, head, dtype=_DTYPE, device=device, requires_grad=True) for _ in range(3)]
    reached, sheet = measured_roofs(setting.device, _DTYPE), sheet_roofs(setting.device, _DTYPE)
    for name, attention in _kinds(setting).items():
        kind = name.partition("/")[0]
        yield Measured("", f"kept/{name}", kept_bytes(kind, s, heads, head), _kept(attention, qkv), "bytes")
        if device.type == "cuda":
            yield Measured("", f"peak/{name}", peak_bytes(kind, s, heads, head), _peak(attention, qkv), "bytes")
        for way, call in (("", _forward(attention, qkv)), ("/backward", _backward(attention, qkv))):
            flops = round(4 * heads * s * s * head * (2.5 if way else 1))
            times = time_call(call, device, seconds=0.2)
            yield time_row(f"{name}{way}", times, reached.seconds(flops, moved_bytes(kind + way, s, heads, head)))
            yield rate_row(f"{name}{way}", times, flops, sheet.flops)
            yield intensity_row(f"{name}{way}", flops, moved_bytes(kind + way, s, heads, head))


def _kinds(setting: Setting) -> Mapping[str, Attention]:
    """The programs that this device can run; Triton compiles for GPUs alone."""
    kinds: dict[str, Attention] = {"standard": standard_attention, "flash": scaled_dot_product_attention}
    if not with_triton(setting.device):
        return kinds
    from kernels.flash_attention import flash_attention

    return kinds | {"flash/triton": flash_attention}


def _forward(attention: Attention, qkv: list[Tensor]) -> Callable[[], object]:
    """The forward pass alone: nothing is kept."""
    return partial(attention, *(x.detach() for x in qkv))


def _backward(attention: Attention, qkv: list[Tensor]) -> Callable[[], object]:
    """The backward pass alone, again and again over one forward pass."""
    out = attention(*qkv)
    return partial(torch.autograd.grad, out, qkv, torch.ones_like(out), retain_graph=True)


def kept_bytes(kind: str, s: int, heads: int, head: int) -> int:
    """Bytes kept for backward in 16 bits: q, k and v; then the probabilities, or the output and the logsumexp in fp32."""
    inputs = 3 * 2 * heads * s * head
    return inputs + (2 * heads * s * s if kind == "standard" else 2 * heads * s * head + 4 * heads * s)


def peak_bytes(kind: str, s: int, heads: int, head: int) -> int:
    """Bytes above the inputs at the highest point of forward: scores twice and the output, or the output and the logsumexp."""
    output = 2 * heads * s * head
    return output + (2 * 2 * heads * s * s if kind == "standard" else 4 * heads * s)


def moved_bytes(kind: str, s: int, heads: int, head: int) -> int:
    """Bytes over the bus. Forward: inputs and output once; standard attention writes and reads the scores, scaled, and their softmax.

    Backward: q, k, v, out and its gradient in, three gradients out; standard attention reads the probabilities twice, and writes
    and reads their gradient, the scores', and that scaled back (which two products read).
    """
    name, _, way = kind.partition("/")
    tensors, passes = (8, 9) if way else (4, 6)
    once = tensors * 2 * heads * s * head
    return once + (passes * 2 * heads * s * s if name == "standard" else 4 * heads * s)


def _kept(attention: Attention, qkv: list[Tensor]) -> int:
    """What autograd keeps, each storage once; the scalars that CUDA's kernel keeps of its random state are left out."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = attention(*qkv)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept if tensor.dim() > 1
    }
    assert out.requires_grad
    return sum(storages.values())


def _peak(attention: Attention, qkv: list[Tensor]) -> int:
    """The allocator's highest point above what was there. Not run on a GPU yet."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention(*qkv)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
