"""One rank of a served model: what its operations need to know, and the operations that every layer shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from calc.kernel_times import KernelTimes
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Part, Split, Weight
from calc.serving.formats import WeightFormat
from calc.serving.speed.precision import gemm_format
from calc.serving.speed.work import BYTES, Array, Layout, TokenWork
from calc.units import ceil_div

_KV = {"fp32": "bf16", "q8_0": "int8", "q5_1": "int4", "q5_0": "int4", "q4_1": "int4", "q4_0": "int4"}  # read as
_QUANTISED = (
    "fp8_block",
    "nvfp4",
)  # the input is quantised by a kernel of its own (vLLM, SGLang; in TensorRT-LLM's tables with the matmul)


@dataclass(frozen=True, slots=True)
class Rank:
    """`form` and `kv` are the formats of the weights and of the cache."""

    spec: ModelSpec
    layout: Layout
    times: KernelTimes
    form: WeightFormat
    kv: str
    query: int = 1  # tokens of one sequence in a decode step: 1 and the draft's
    fp8_block_experts: KernelTimes | None = (
        None  # of experts in FP8 blocks, where the engine takes other kernels than its table's
    )

    @property
    def cache(self) -> str:
        """The cache's format as the kernels read it."""
        return _KV.get(self.kv, self.kv)

    def format(self, kind: Layer, part: Part, weight: Weight) -> str:
        return gemm_format(self.spec, self.form, kind, part, weight, self.times.gpu)

    def norm(self, path: str) -> TokenWork:
        """The norm with the residual added: reads both, writes both."""
        size = self.spec.hidden_size * BYTES * 2
        return TokenWork(path, 1, lambda tokens: self.times.memory_bound(tokens * size, tokens * size))

    def passed(self, read: float, write: float) -> Callable[[Array], Array]:
        """One kernel that reads and writes so many bytes of each token."""
        return lambda tokens: self.times.memory_bound(tokens * read, tokens * write)

    def send(self, tokens: Array) -> Array:
        return self.times.collective("send", tokens * self.spec.hidden_size * BYTES, 2)

    def all_reduce(self, tokens: Array) -> Array:
        return self.reduced(tokens * self.spec.hidden_size * BYTES)

    def reduced(self, size: Array) -> Array:
        """An all-reduce of so many bytes over the tensor-parallel ranks: the engine's own kernel or NCCL, whichever is faster."""
        ranks = self.layout.tp
        return np.minimum(
            self.times.collective("all_reduce", size, ranks, kernel="custom"),
            self.times.collective("all_reduce", size, ranks),
        )

    def matmuls(self, kind: Layer, part: Part, skip: frozenset[str] = frozenset()) -> Iterator[TokenWork]:
        """The part's matmuls; weights that read the same input run as one."""
        fused: dict[tuple[int, bool, str], list[Weight]] = {}
        for weight in part.weights:
            if weight.matmul and weight.name not in skip:
                form = self.format(kind, part, weight)
                key = (weight.shape[-1].size, weight.split is Split.INPUT, form)
                fused.setdefault(key, []).append(weight)
        kv = getattr(kind.mixer, "num_key_value_heads", 0) or 1
        for (inputs, row_parallel, form), weights in fused.items():
            n = sum(self.outputs(weight, kv) for weight in weights)
            k = ceil_div(inputs, self.layout.tp) if row_parallel else inputs
            name = "_".join(weight.name for weight in weights)
            if form in _QUANTISED and self.times.engine != "trtllm":
                yield TokenWork(f"{part.name}/quantise", 1, self.passed(k * BYTES, k))
            yield TokenWork(f"{part.name}/{name}", 1, gemm(self.times, n, k, form))

    def outputs(self, weight: Weight, kv: int) -> int:
        size = weight.shape[0].size
        if weight.split is Split.KV:
            return ceil_div(size, min(self.layout.tp, kv))
        return ceil_div(size, self.layout.tp) if weight.split in (Split.OUTPUT, Split.VOCAB) else size


def gemm(times: KernelTimes, n: int, k: int, form: str) -> Callable[[Array], Array]:
    """A matmul of so many outputs and inputs, in a format."""
    return lambda tokens: times.gemm(tokens, n, k, dtype=form)
