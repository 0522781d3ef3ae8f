"""Compiles every configuration of every kernel for one target, with no GPU at hand, and prints rows of kernels/compiled.csv.

`python -m tests.kernels.compile_kernels cuda:90 [KERNEL [BLOCKS WARPS STAGES]]`. Each launcher is called on small CPU tensors; where
it would launch a kernel, every configuration that its autotuner knows is compiled instead. Of several shapes in one case the
worst is kept.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, autotuner
from triton.runtime.driver import driver

from kernels import (
    adamw,
    copy,
    cross_entropy,
    flash_attention,
    flash_attention_backward,
    int4_matmul,
    int8_matmul,
    launch,
    layer_norm,
    matmul,
    paged_decode,
    quantize_int8,
    quantize_nf4,
    rms_norm,
    rope,
    softmax,
    swiglu,
    triad,
)
from kernels.launch import SHARED, Clean, Compiled, blocks

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
# the tensor cores' instructions: Blackwell's, Hopper's, those before; CDNA's
TENSOR = {"tcgen05.mma": "tcgen05", "wgmma.mma_async": "wgmma", "mma.sync": "mma.sync", "v_mfma": "mfma"}
Launch = Callable[[], object]


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def launches(target: str) -> Iterator[tuple[str, Launch]]:
    """(case, launch) of every kernel; the case of a kernel that is pruned by compiled.csv is its own."""
    yield "", lambda: copy.copy(bf16(4, 1024))
    yield "", lambda: triad.triad(bf16(4, 1024), bf16(4, 1024), 2.0)
    yield from _products(fp8=target in ("cuda:90", "cuda:100"))
    yield from _rows()
    # the edges of a head are a mask: they change registers, looked into where a spill is refused, and not shared memory
    for head in (64, 80, 96, 128, 192, 256) if target == "cuda:90" else (64, 128, 256):
        yield "", lambda head=head: _attention(head)  # type: ignore[misc]
        yield "", lambda head=head: _decode(head)  # type: ignore[misc]
    for heads in (16, 128):
        yield "", lambda heads=heads: _latent_decode(heads)  # type: ignore[misc]
    for vocabulary in (50_257, 128_256, 262_144):
        logits = bf16(2, vocabulary)
        yield str(vocabulary), lambda logits=logits: cross_entropy.loss_and_gradient(logits, int32(2))  # type: ignore[misc]
    yield "", lambda: rope.rope(bf16(1, 2, 128, 128), torch.zeros(128, 64), torch.zeros(128, 64))
    param = torch.zeros(1024)
    yield "", lambda: adamw.adamw(param, param, param, param, step=1)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _products(fp8: bool) -> Iterator[tuple[str, Launch]]:
    for dtype in (torch.bfloat16, torch.int8, *([torch.float8_e4m3fn] if fp8 else [])):
        x = torch.zeros(1024, 1024, dtype=dtype)
        yield "", lambda x=x: matmul.matmul(x, x.t())  # type: ignore[misc]
    q, scale = torch.zeros(1024, 1024, dtype=torch.int8), torch.zeros(1024)
    yield "", lambda: int8_matmul.int8_matmul(bf16(64, 1024), q, scale)
    packed = torch.zeros(1024, 512, dtype=torch.uint8)
    for group in int4_matmul.GROUPS:
        yield "", lambda group=group: int4_matmul.int4_matmul(bf16(64, 1024), packed, torch.zeros(1024, 1024 // group))  # type: ignore[misc]


def _rows() -> Iterator[tuple[str, Launch]]:
    for columns in (1024, 8192):
        x, weight = bf16(4, columns).requires_grad_(), bf16(columns).requires_grad_()
        for norm in (rms_norm.rms_norm, layer_norm.layer_norm):
            weights = (weight,) if norm is rms_norm.rms_norm else (weight, weight)
            yield str(columns), lambda norm=norm, x=x, w=weights: norm(x, *w).backward(bf16(*x.shape))  # type: ignore[misc]
    for columns in (1024, 20_000):
        x = bf16(2, columns).requires_grad_()
        yield str(columns), lambda x=x: softmax.softmax(x).backward(bf16(*x.shape))  # type: ignore[misc]
    x = bf16(4, 1024)
    yield "", lambda: swiglu.swiglu(x.requires_grad_(), x).backward(bf16(4, 1024))
    yield "", lambda: quantize_int8.dequantize_int8(*quantize_int8.quantize_int8(x.detach()))
    yield "", lambda: quantize_nf4.dequantize_nf4(quantize_nf4.quantize_nf4(x.detach(), double=True))


def _attention(head: int) -> None:
    x = bf16(1, 2, 128, head)
    out, lse = flash_attention.forward(x, x, x, causal=True)
    flash_attention_backward.backward(x, x, x, x, out, lse, causal=True)


def _decode(head: int) -> None:
    cache = bf16(8, 16, 2, head)
    paged_decode.paged_decode(bf16(1, 128, head), cache, cache, int32(1, 4), int32(1))


def _latent_decode(heads: int) -> None:
    paged_decode.paged_decode_latent(
        bf16(1, heads, 576), bf16(8, 64, 576), int32(1, 4), int32(1), value_dim=512, scale=1.0
    )


class Recorder:
    """Takes the place of launching: compiles, and keeps a row for each configuration."""

    def __init__(self, target: str, kernel: str = "", choice: tuple[str, ...] = ()) -> None:
        self.target, self.kernel, self.choice, self.case = target, kernel, choice, ""
        self.rows: dict[tuple[object, ...], Compiled] = {}
        self.compile = JITFunction.run

    def add(self, fn: JITFunction, case: str, config: triton.Config | None, made: object) -> None:
        given = (blocks(config), config.num_warps, config.num_stages) if config else ("-", made.metadata.num_warps, 1)
        row = Compiled(name(fn), case, self.target, *given, *_usage(made))
        before = self.rows.get(row[:6])
        worst = [max(a, b) for a, b in zip(row[6:9], before[6:9], strict=True)] if before else row[6:9]
        wide = min(row.wide, before.wide) if before else row.wide
        self.rows[row[:6]] = Compiled(*row[:6], *worst, row.tensor, wide)

    def run(self, fn: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> object:
        """In place of JITFunction.run, for a kernel that is not tuned."""
        if self.kernel not in ("", name(fn)):
            return None
        made = self.compile(fn, *args, grid=(1,), warmup=True, **options)
        self.add(fn, self.case, None, made)
        return made

    def tune(self, tuner: autotuner.Autotuner, *args: object, **options: object) -> None:
        """In place of Autotuner.run."""
        named = dict(zip(tuner.arg_names, args, strict=False))
        heuristics = getattr(tuner.fn, "values", {})
        jitted = tuner.fn
        while not isinstance(jitted, JITFunction):
            jitted = jitted.fn
        if self.kernel not in ("", name(jitted)):
            return
        prune = tuner.early_config_prune
        case = prune.case({**named, **options}) if isinstance(prune, Clean) else self.case
        tuner.nargs = named
        for config in tuner.configs if isinstance(prune, Clean) else tuner.prune_configs(options):
            if self.choice and self.choice != (blocks(config), str(config.num_warps), str(config.num_stages)):
                continue
            given = {**options, **config.all_kwargs()}
            given.pop("grid", None), given.pop("warmup", None)
            given.update({key: value({**named, **given}) for key, value in heuristics.items()})
            given = {key: value for key, value in given.items() if value is not None}
            self.add(jitted, case, config, self.compile(jitted, *args, grid=(1,), warmup=True, **given))


def name(fn: JITFunction) -> str:
    return f"{fn.fn.__module__.removeprefix('kernels.')}.{fn.fn.__name__}"


def _usage(made: object) -> tuple[int, int, int, str, int]:
    """Registers, spilled bytes, shared bytes, tensor cores' instruction, widest load."""
    text = made.asm.get("ptx") or made.asm["amdgcn"]
    tensor = next((short for found, short in TENSOR.items() if found in text), "-")
    if "ptx" not in made.asm:
        registers, scratch = (
            int(re.search(rf"\.{field}:\s+(\d+)", text)[1]) for field in ("vgpr_count", "private_segment_fixed_size")
        )
        words = [int(wide or 1) for wide in re.findall(r"(?:global|buffer)_load_dword(?:x(\d))?", text)]
        return registers, scratch, made.metadata.shared, tensor, 4 * max(words, default=0)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(made.asm["cubin"])
        cubin.flush()
        told = subprocess.run([CUOBJDUMP, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(value) for value in re.search(r"REG:(\d+) STACK:(\d+)", told).groups())
    loads = [int(v or 1) * int(b) // 8 for v, b in re.findall(r"ld\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.b(\d+)", text)]
    copies = [int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global.*?,\s*(0x\w+)", text)]
    return registers, stack, made.metadata.shared, tensor, max(loads + copies, default=0)


def record(target: str, kernel: str = "", *choice: str) -> list[Compiled]:
    """Rows of a target: all, or one kernel's, or those of one of its choices."""
    backend, arch = target.split(":")
    gpu = GPUTarget(backend, int(arch) if backend == "cuda" else arch, 32 if backend == "cuda" else 64)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: gpu,
            get_current_device=lambda: 0,
            get_current_stream=lambda device=0: 0,
            utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": SHARED[target]}),
        )
    )
    launch.check_device = lambda name, x: None
    copy._check = lambda out, x: None
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=100)
    recorder = Recorder(target, kernel, choice)
    JITFunction.run = lambda self, *args, **options: recorder.run(self, *args, **options)
    autotuner.Autotuner.run = lambda self, *args, **options: recorder.tune(self, *args, **options)
    for case, start in launches(target):
        recorder.case = case
        start()
    return list(recorder.rows.values())


if __name__ == "__main__":
    assert not knobs.runtime.interpret
    csv.writer(sys.stdout, lineterminator="\n").writerows(record(*sys.argv[1:]))
