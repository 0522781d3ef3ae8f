"""Compiles every kernel for the GPU named by the arguments (backend, architecture, threads of a warp), with none at hand.

Each launcher is called on small CPU tensors; where it would launch a kernel, that is compiled in the last of its
configurations, which takes the least shared memory, and a line of JSON tells its name and that memory's bytes.
"""

import json
import sys
from types import SimpleNamespace

import torch
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

compile_only = JITFunction.run


def run(self, *args, grid, warmup, **options):
    """In place of JITFunction.run."""
    made = compile_only(self, *args, grid=(1,), warmup=True, **options)
    print(json.dumps([f"{self.fn.__module__.split('.')[-1]}.{self.fn.__name__}", made.metadata.shared]), flush=True)
    return made


def run_last(self, *args, **options):
    """In place of Autotuner.run."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    config = self.prune_configs(options)[-1]
    return self.fn.run(*args, **options, **config.all_kwargs())


def pretend(backend, arch, warp):
    """A GPU of that kind, as far as compiling goes."""
    target = GPUTarget(backend, arch, warp)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device=0: 0
        )
    )
    launch.check_device = lambda name, x: None
    copy._check = lambda out, x: None
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=100)
    JITFunction.run, autotuner.Autotuner.run = run, run_last


def bf16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)


def int32(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def compile_all(fp8):
    x, weight = bf16(4, 1024), bf16(1024)
    copy.copy(x.detach())
    triad.triad(x.detach(), x.detach(), 2.0)
    for dtype in (torch.bfloat16, torch.int8, *([torch.float8_e4m3fn] if fp8 else [])):
        matmul.matmul(torch.zeros(64, 64, dtype=dtype), torch.zeros(64, 64, dtype=dtype).t())
    for out in (softmax.softmax(x), rms_norm.rms_norm(x, weight), layer_norm.layer_norm(x, weight, weight)):
        out.backward(torch.zeros_like(x))
    softmax.softmax(bf16(2, 20_000)).backward(torch.zeros(2, 20_000, dtype=torch.bfloat16))
    swiglu.swiglu(x, x).backward(torch.zeros_like(x))
    cross_entropy.loss_and_gradient(x.detach(), int32(4))

    heads = torch.zeros(1, 2, 128, 128, dtype=torch.bfloat16)
    out, lse = flash_attention.forward(heads, heads, heads, causal=True, window=64)
    flash_attention_backward.backward(heads, heads, heads, heads, out, lse, causal=True, window=64)
    cache = torch.zeros(8, 16, 2, 128, dtype=torch.bfloat16)
    paged_decode.paged_decode(heads[:, :, 0].contiguous(), cache, cache, int32(1, 4), int32(1))
    latents = torch.zeros(8, 16, 576, dtype=torch.bfloat16)
    query = torch.zeros(1, 16, 576, dtype=torch.bfloat16)
    paged_decode.paged_decode_latent(query, latents, int32(1, 4), int32(1), value_dim=512, scale=1.0)

    q, scale = quantize_int8.quantize_int8(x.detach())
    quantize_int8.dequantize_int8(q, scale)
    quantize_nf4.dequantize_nf4(quantize_nf4.quantize_nf4(x.detach(), double=True))
    int8_matmul.int8_matmul(x.detach(), q, scale)
    int4_matmul.int4_matmul(x.detach(), torch.zeros(64, 512, dtype=torch.uint8), torch.zeros(64, 8))
    param = torch.zeros(1024)
    adamw.adamw(param, param, param, param, step=1)
    angle = torch.zeros(128, 64)
    rope.rope(heads, angle, angle)


if __name__ == "__main__":
    backend, arch, warp = sys.argv[1], sys.argv[2], int(sys.argv[3])
    assert not knobs.runtime.interpret
    pretend(backend, int(arch) if backend == "cuda" else arch, warp)
    compile_all(fp8=backend == "cuda" and int(arch) >= 89)
