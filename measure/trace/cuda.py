"""CUDA's choices on fake CPU tensors: attention kernels, fused dropout, autocast lists, and masks that a real run skips.

A build of PyTorch without CUDA cannot run autograd on fake `cuda` tensors, so the trace runs on fake `cpu` tensors and overrides,
at the dispatcher, the operators whose CPU version keeps other tensors than CUDA's.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

# Operators that CUDA's autocast runs in fp32 (AT_FORALL_FP32 in PyTorch's ATen/autocast_mode.h) and CPU's leaves alone.
FP32_OPERATORS = (
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "cosine_similarity",
    "kl_div",
    "l1_loss",
    "logsumexp",
)
# Operators that it runs with dtype=fp32 unless the caller named one (AT_FORALL_FP32_SET_OPT_DTYPE).
FP32_OUTPUT_OPERATORS = (
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "sum",
    "sum.dim_IntList",
)

_MASK_ALIGNMENT = 16  # elements; the efficient kernel's bias (mem_eff_alignment in ATen's transformers/attention.cpp)
_FLASH_HEAD_LIMIT = 256


@contextlib.contextmanager
def cuda_choices() -> Iterator[None]:
    """Within it, fake CPU tensors take the operators that CUDA takes. Not reentrant, and global to the process."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("scaled_dot_product_attention", attention, "AutogradCPU")
    library.impl("dropout", dropout, "AutogradCPU")
    aten = torch.ops.aten
    for name in itertools.chain(FP32_OPERATORS, FP32_OUTPUT_OPERATORS):
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
            continue  # CPU's own list has the same policy
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(aten, packet), overload or "default")
        wrap = _in_fp32 if name in FP32_OPERATORS else _to_fp32
        library.impl(name, wrap(operator), "AutocastCPU")
    try:
        with no_packed_masks(), _one_autocast():
            yield
    finally:
        library._destroy()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by the kernel that CUDA picks (sdp_utils.cpp, PyTorch 2.13): flash, else efficient, else plain math."""
    scale = query.size(-1) ** -0.5 if scale is None else scale
    kernel = choose_kernel(query, key, value, attn_mask)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, zero, torch.full_like(zero, float("-inf")))
    if kernel == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if kernel == "efficient":
        bias = _aligned_bias(attn_mask, query, key)
        needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        output: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
        )[0]
        return output
    return _math(query, key, value, attn_mask, dropout_p, is_causal, scale)


def choose_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str:
    """The kernel that CUDA's dispatcher picks on compute capability 8.0 and later: `flash`, `efficient` or `math`.

    Flash takes 16-bit tensors with one head size up to 256 and no mask. The efficient kernel takes fp32, masks and another
    head size for the values, but equal head counts: grouped heads in fp32 fall to plain math (PyTorch 2.13).
    """
    same_head = query.size(-1) == key.size(-1) == value.size(-1)
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and mask is None and same_head and query.size(-1) <= _FLASH_HEAD_LIMIT:
        return "flash"
    alignment = 8 if half else 4
    aligned = query.size(-1) % alignment == 0 and value.size(-1) % alignment == 0
    if aligned and query.size(-3) == key.size(-3) == value.size(-3):
        return "efficient"
    return "math"


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float) -> Tensor:
    head = query.size(-1)
    if head % 8:
        padding = (0, 8 - head % 8)
        query, key, value = (torch.nn.functional.pad(tensor, padding) for tensor in (query, key, value))
    output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return output[..., :head] if head % 8 else output


def _aligned_bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if mask is None:
        return None
    length = mask.size(-1)
    if length % _MASK_ALIGNMENT:
        padding = (0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT)
        mask = torch.nn.functional.pad(mask, padding)[..., :length]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def _math(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float
) -> Tensor:
    """PyTorch's plain composition (_scaled_dot_product_attention_math), which computes 16-bit inputs in fp32."""
    kept = query.dtype
    if kept in (torch.float16, torch.bfloat16):
        query, key, value = query.float(), key.float(), value.float()
    query = query * scale**0.5
    if is_causal:
        ones = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(ones, zero, torch.full_like(zero, float("-inf")))
    groups = query.size(-3) // key.size(-3)
    if groups > 1:
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = torch.matmul(query, key.transpose(-2, -1) * scale**0.5)
    if mask is not None:
        scores.add_(mask)
    scores = torch.softmax(scores, -1)  # the name is taken again, as in PyTorch: what it held is freed
    if dropout_p > 0.0:
        scores = torch.dropout(scores, dropout_p, True)
    return torch.matmul(scores, value).to(kept)


def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """CUDA's fused dropout, which keeps a mask of one byte an element."""
    if p == 0 or not train or input.numel() == 0:
        return input
    output: Tensor = torch.ops.aten.native_dropout(input, p, train)[0]
    return output


def grouped_mm(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The experts' grouped matmul. The kernel takes fp32 and fp16 too; its description for fake tensors knows bf16 only."""
    kept = left.dtype
    return torch.ops.aten._grouped_mm(left.bfloat16(), right.bfloat16(), *args, **kwargs).to(kept)


def layer_norm(*args: Any) -> Any:
    """Layer norm with its statistics in fp32, as CUDA keeps them; on a CPU they have the input's format."""
    output, *statistics = torch.ops.aten.native_layer_norm(*args)
    return output, *(each.float() for each in statistics)


def _eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _in_fp32(operator: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            args, kwargs = tree_map(lambda value: value.float() if _eligible(value) else value, (args, kwargs))
            return operator(*args, **kwargs)

    return kernel


def _to_fp32(operator: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            if (
                _eligible(args[0])
                and kwargs.get("dtype") is None
                and torch.float64 not in args
                and len(args) < _dtype_at(operator)
            ):
                kwargs["dtype"] = torch.float32
            return operator(*args, **kwargs)

    return kernel


def _dtype_at(operator: Any) -> int:
    """Where `dtype` stands among the operator's positional arguments (past the end when it is keyword-only)."""
    names = [argument.name for argument in operator._schema.arguments if not argument.kwarg_only]
    return names.index("dtype") + 1 if "dtype" in names else len(names) + 1


@contextlib.contextmanager
def _one_autocast() -> Iterator[None]:
    """Who asks whether autocast runs, and names no device, means CUDA's; here the CPU's stands for it."""
    asked = torch.is_autocast_enabled
    torch.is_autocast_enabled = lambda device="cpu": asked(device)
    try:
        yield
    finally:
        torch.is_autocast_enabled = asked


@contextlib.contextmanager
def no_packed_masks() -> Iterator[None]:
    """A real run sees from the positions that no sequences are packed; fake tensors have no values to see that from."""
    from transformers import masking_utils

    kept = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = kept
