"""Serving: the cache that a model really keeps, decoding from blocks of it, and prefill and decode of a small real model.

Triton's decode kernel, and all readings on a GPU, have not run on one yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from calc.hardware import Gpu, custom_gpu
from calc.measurements.records import Measured
from calc.model.config import from_config
from calc.serving import ServingPlan, serve
from calc.units import GB, TB, ceil_div
from measure.setting import Setting
from measure.timing import time_call
from measure.trace import TraceOptions
from measure.trace.model import build, quiet
from measure.workloads.cases import Case, each, timed_size
from measure.workloads.kernel_rows import (
    bandwidth_row,
    intensity_row,
    measured_roofs,
    sheet_roofs,
    time_row,
    with_triton,
)
from measure.workloads.models import config_of, name_of, two_depths, with_depth

Decoding = Callable[[], Tensor]

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
    """Seconds to the first token and for each further one, against the roofline of what this device reaches."""
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


_LATENT, _ROTARY, _LATENT_SCALE = 512, 64, 192**-0.5  # DeepSeek-V3's
# sequences, tokens of each, query heads, KV heads, head size
_DECODES: Final = {"small": (4, 1024, 8, 2, 64), "medium": (32, 4096, 32, 8, 128)}


def paged_decode(setting: Setting) -> Iterator[Measured]:
    """`bandwidth/...` of one query a sequence over a cache in blocks: the bytes of the keys and values over its time."""
    setting = timed_size(setting)
    return each(setting, [Case(title, partial(_decodes, setting, made)) for title, made in paged(setting)])


class Decode(NamedTuple):
    """A cache in blocks that is there, what one step over it takes, and the programs that make it."""

    blocks_bytes: int  # by formula
    held: int
    flops: int
    nbytes: int
    programs: Mapping[str, Decoding]


def paged(setting: Setting) -> Iterator[tuple[str, Callable[[int], Decode]]]:
    """What is decoded at the setting's size: a title, and what makes it with the length divided by a number."""
    sequences, length, *sizes = _DECODES[setting.size]
    title = f"{sequences} sequences of {length} tokens"
    yield title, lambda divisor: _grouped(setting, sequences, length // divisor, *sizes)
    latents = f"{title}, latents of {_LATENT} + {_ROTARY}"
    yield latents, lambda divisor: _latents(setting, sequences, length // divisor, sizes[0])


def _decodes(setting: Setting, make: Callable[[int], Decode], divisor: int) -> Iterator[Measured]:
    found, dtype = make(divisor), torch.bfloat16
    yield Measured("", "cache blocks", found.blocks_bytes, found.held, "bytes")
    roof = sheet_roofs(setting.device, dtype).bandwidth
    for name, decode in found.programs.items():
        times = time_call(decode, torch.device(setting.device.name), seconds=0.3)
        yield time_row(name, times, measured_roofs(setting.device, dtype).seconds(found.flops, found.nbytes))
        yield bandwidth_row(name, times, found.nbytes, roof)
        yield intensity_row(name, found.flops, found.nbytes)


def _blocks(setting: Setting, sequences: int, length: int, *row: int) -> tuple[Callable[[], Tensor], Tensor, Tensor]:
    """A maker of caches whose tokens have that shape, and the table and lengths of so many sequences over them."""
    torch.manual_seed(0)
    device = torch.device(setting.device.name)
    blocks = ceil_div(length, _BLOCK)
    table = torch.randperm(sequences * blocks, device=device).view(sequences, blocks).to(torch.int32)
    lengths = torch.full((sequences,), length, dtype=torch.int32, device=device)

    def cache() -> Tensor:
        return torch.randn(sequences * blocks, _BLOCK, *row, device=device).to(torch.bfloat16)

    return cache, table, lengths


def _grouped(setting: Setting, sequences: int, length: int, heads: int, kv_heads: int, head: int) -> Decode:
    """Keys and values of grouped heads."""
    cache, table, lengths = _blocks(setting, sequences, length, kv_heads, head)
    keys, values = cache(), cache()
    query = torch.randn(sequences, heads, head, device=keys.device).to(keys.dtype)
    per_token = 2 * kv_heads * head * keys.itemsize
    plain = partial(gathered_decode, query, keys, values, table, length)
    programs = _programs(setting, plain, "paged_decode", query, keys, values, table, lengths)
    flops, nbytes = 4 * sequences * length * heads * head, sequences * length * per_token
    return Decode(table.numel() * _BLOCK * per_token, keys.nbytes + values.nbytes, flops, nbytes, programs)


def _latents(setting: Setting, sequences: int, length: int, heads: int) -> Decode:
    """Multi-head latent attention: one row a token for all heads, key and, in its first part, value."""
    width = _LATENT + _ROTARY
    cache, table, lengths = _blocks(setting, sequences, length, width)
    latents = cache()
    query = torch.randn(sequences, heads, width, device=latents.device).to(latents.dtype)
    per_token = width * latents.itemsize
    named = {"value_dim": _LATENT, "scale": _LATENT_SCALE}
    plain = partial(gathered_latent_decode, query, latents, table, length, **named)
    programs = _programs(setting, plain, "paged_decode_latent", query, latents, table, lengths, **named)
    flops, nbytes = 2 * sequences * length * heads * (width + _LATENT), sequences * length * per_token
    return Decode(table.numel() * _BLOCK * per_token, latents.nbytes, flops, nbytes, programs)


def _programs(setting: Setting, plain: Decoding, kernel: str, *given: Any, **named: Any) -> Mapping[str, Decoding]:
    """The programs that this device can run: torch's, and a Triton kernel on what it is given."""
    if not with_triton(setting.device):
        return {"torch": plain}
    from kernels import paged_decode

    return {"torch": plain, "triton": partial(getattr(paged_decode, kernel), *given, **named)}


def gathered_decode(q_BHD: Tensor, k_NTHD: Tensor, v_NTHD: Tensor, table_BM: Tensor, length: int) -> Tensor:
    """What torch has without a paged kernel: gather the blocks, then attend; sequences of one length."""
    k, v = (cache[table_BM].flatten(1, 2)[:, :length].transpose(1, 2) for cache in (k_NTHD, v_NTHD))
    return scaled_dot_product_attention(q_BHD[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def gathered_latent_decode(
    q_BHR: Tensor, cache_NTR: Tensor, table_BM: Tensor, length: int, *, value_dim: int, scale: float
) -> Tensor:
    """The same over latents, which all heads share as key and, in their first part, as value."""
    keys = cache_NTR[table_BM].flatten(1, 2)[:, None, :length]
    values = keys[..., :value_dim]
    return scaled_dot_product_attention(q_BHR[:, :, None], keys, values, scale=scale, enable_gqa=True)[:, :, 0]
