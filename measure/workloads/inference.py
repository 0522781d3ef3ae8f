"""Serving: the cache that a model really keeps, decoding from blocks of it, and prefill and decode of a small real model.

Triton's decode kernel, and all readings on a GPU, have not run on one yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from calc.hardware import Gpu, custom_gpu
from calc.model.config import from_config
from calc.records import Measured
from calc.serving import ServingPlan, serve
from calc.units import GB, TB, ceil_div
from measure.timing import time_call
from measure.trace import TraceOptions
from measure.trace.model import build, quiet
from measure.workloads import Setting
from measure.workloads.cases import Case, each
from measure.workloads.kernel_rows import bandwidth_row, intensity_row, measured_roofs, sheet_roofs, time_row
from measure.workloads.models import config_of, name_of, two_depths, with_depth

_BLOCK: Final = 16  # tokens of a block, vLLM's default
_LENGTHS: Final = {"small": (128, 256, 512), "medium": (1024, 4096, 8192)}


def kv_cache_growth(setting: Setting) -> Iterator[Measured]:
    """Bytes of the DynamicCache that a real forward pass fills, at several lengths, and the bytes of one token more."""
    return each(setting, [Case(name_of(setting), partial(_growth, setting))])


def _growth(setting: Setting, divisor: int) -> Iterator[Measured]:
    """The user's model keeps its width and loses depth: every layer of a kind keeps the same."""
    config = config_of(setting)
    cut = with_depth(config, two_depths(from_config(config))[1])
    spec = from_config(cut)
    model = _model(cut, torch.device(setting.device.name if not setting.model else "meta"), torch.bfloat16)
    held, predicted = [], []
    lengths = [length // divisor for length in _LENGTHS[setting.size]]
    for index, length in enumerate(lengths):
        setting.tell(index / len(lengths), f"{length} tokens")
        predicted.append(serve(spec, ServingPlan(context=length)).kv_bytes)
        held.append(_cache_bytes(model, length))
        yield Measured(f"{length} tokens", "state", predicted[-1], held[-1], "bytes")
    steps = lengths[-1] - lengths[0]
    growth = [(more - less) // steps for less, more in ((predicted[0], predicted[-1]), (held[0], held[-1]))]
    yield Measured(f"from {lengths[0]} to {lengths[-1]} tokens", "growth a token", growth[0], growth[1], "bytes")


def _model(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    with quiet():
        model = build(config, TraceOptions(seq=1, recipe="pure-bf16", dropout="off"), device)
    return model.to(dtype).eval()


def _cache_bytes(model: nn.Module, length: int) -> int:
    """Bytes of all tensors of the cache after one forward pass over so many tokens."""
    tokens = torch.ones(1, length, dtype=torch.int64, device=next(model.parameters()).device)
    with torch.no_grad(), quiet():
        cache = model(tokens, use_cache=True, logits_to_keep=1).past_key_values
    tensors = (value for layer in cache.layers for value in vars(layer).values())
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor) and tensor.dim() > 0)


def prefill_decode(setting: Setting) -> Iterator[Measured]:
    """Seconds to the first token and for each further one, beside the roofline of what this device reaches."""
    prompt = {"small": 256, "medium": 2048}[setting.size]
    cases = [Case(f"{setting.size} Llama, batch {batch}", partial(_served, setting, prompt, batch)) for batch in (1, 4)]
    return each(setting, cases)


def _served(setting: Setting, prompt: int, batch: int, divisor: int) -> Iterator[Measured]:
    on_cpu = setting.device.kind == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16
    config = config_of(setting)
    device = torch.device(setting.device.name)
    model = _model(config, device, dtype)
    form: Any = "fp32" if on_cpu else "bf16"
    plan = ServingPlan(weights=form, kv_dtype=form, context=prompt // divisor, concurrency=batch)
    speed = serve(from_config(config), plan, _as_reached(setting, dtype)).speed
    tokens = torch.randint(0, config["vocab_size"], (batch, prompt // divisor), device=device)
    with torch.no_grad():
        prefill = time_call(lambda: model(tokens[:1], logits_to_keep=1), device, seconds=0.5, warm_up=2, least=5)
        yield time_row("first token", prefill, speed.ttft_s)
        cache = model(tokens, use_cache=True, logits_to_keep=1).past_key_values

        def step() -> None:
            model(tokens[:, -1:], cache=cache, logits_to_keep=1)
            cache.crop(-1)  # each step meets the same length

        yield time_row("each token", time_call(step, device, seconds=0.5), speed.tpot_s)
    yield Measured(
        "", "weights and cache read in a step", speed.weights_read_bytes + speed.kv_read_bytes, None, "bytes"
    )


def _as_reached(setting: Setting, dtype: torch.dtype) -> Gpu:
    """This device with the rates that it reaches: what is left in the error is launches and what the formulas leave out."""
    reached = measured_roofs(setting.device, dtype)
    assert reached.flops
    assert reached.bandwidth
    return custom_gpu(setting.device.memory_bytes / 2**30, reached.flops / TB, reached.bandwidth / GB)


# sequences, tokens of each, query heads, KV heads, head size
_DECODES: Final = {"small": (4, 1024, 8, 2, 64), "medium": (32, 4096, 32, 8, 128)}


def paged_decode(setting: Setting) -> Iterator[Measured]:
    """`bandwidth/...` of one query a sequence over a cache in blocks: the bytes of the keys and values over its time."""
    sequences, length, *sizes = _DECODES[setting.size]
    case = Case(
        f"{sequences} sequences of {length} tokens",
        lambda divisor: _decodes(setting, sequences, length // divisor, *sizes),
    )
    return each(setting, [case])


def _decodes(setting: Setting, sequences: int, length: int, heads: int, kv_heads: int, head: int) -> Iterator[Measured]:
    torch.manual_seed(0)
    device, dtype = torch.device(setting.device.name), torch.bfloat16
    blocks = ceil_div(length, _BLOCK)
    shape = (sequences * blocks, _BLOCK, kv_heads, head)
    keys, values = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    query = torch.randn(sequences, heads, head, device=device).to(dtype)
    table = torch.randperm(sequences * blocks, device=device).view(sequences, blocks).to(torch.int32)
    lengths = torch.full((sequences,), length, dtype=torch.int32, device=device)
    per_token = 2 * kv_heads * head * dtype.itemsize
    yield Measured("", "cache blocks", sequences * blocks * _BLOCK * per_token, keys.nbytes + values.nbytes, "bytes")
    flops, nbytes = 4 * sequences * length * heads * head, sequences * length * per_token
    roof = sheet_roofs(setting.device, dtype).bandwidth
    for name, decode in _programs(setting).items():
        times = time_call(partial(decode, query, keys, values, table, lengths), device, seconds=0.3)
        yield time_row(name, times, measured_roofs(setting.device, dtype).seconds(flops, nbytes))
        yield bandwidth_row(name, times, nbytes, roof)
        yield intensity_row(name, flops, nbytes)


def _programs(setting: Setting) -> Mapping[str, Callable[..., Tensor]]:
    """The programs that this device can run; Triton compiles for GPUs alone."""
    if setting.device.kind == "cpu":
        return {"torch": gathered_decode}
    try:
        from kernels.paged_decode import paged_decode as kernel
    except ImportError:  # no Triton on this system
        return {"torch": gathered_decode}
    return {"torch": gathered_decode, "triton": kernel}


def gathered_decode(q_BHD: Tensor, k_NTHD: Tensor, v_NTHD: Tensor, table_BM: Tensor, lengths_B: Tensor) -> Tensor:
    """What torch has without a paged kernel: gather the blocks, then attend; sequences of one length."""
    length = int(lengths_B[0])
    k, v = (cache[table_BM].flatten(1, 2)[:, :length].transpose(1, 2) for cache in (k_NTHD, v_NTHD))
    return scaled_dot_product_attention(q_BHD[:, :, None], k, v, enable_gqa=True)[:, :, 0]
