"""The operators of a step that move bytes and multiply no matrices: what each program reads and writes for them.

Bytes are counted operator by operator from what each program runs, for 16-bit activations: an eager operator reads its inputs
and writes its output in memory, a fused kernel reads and writes its ends alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from calc.model.feed_forward import MLP, MoE
from calc.model.mixers import Attention, LatentAttention, Recurrence
from calc.model.spec import Layer
from calc.step_time.operations import Gemm, LayerOperations, Sharding
from calc.step_time.plan import TimePlan
from calc.units import ceil_div


class PerElement(NamedTuple):
    """Bytes for each element that one operator moves forward and backward, and the kernels that it launches."""

    forward: float
    backward: float
    forward_kernels: int
    backward_kernels: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one operator on one rank, forward and backward, and its kernels. `of_experts`: it works on the experts' rows."""

    name: str
    forward: float
    backward: float
    forward_kernels: int
    backward_kernels: int
    of_experts: bool = False

    def scaled(self, factor: float) -> Traffic:
        """So many times the bytes by the same kernels."""
        return replace(self, forward=self.forward * factor, backward=self.backward * factor)


@dataclass(frozen=True, slots=True)
class Program:
    """Which operators of a layer a program fuses."""

    name: str
    norm: str
    residual: str
    activation: str
    rotary: str
    loss: str


# Norms. eager: transformers' RMSNorm, operator by operator: to fp32, square, mean, times 1/rms, to 16 bits, times weight; its
# backward accordingly. native: one torch kernel forward, two backward (the second reduces the weight's gradient). fused:
# Transformer Engine's and Liger-Kernel's, whose backward keeps the weight's partial sums; compiled: Inductor joins the residual's addition.
NORMS: Final[Mapping[str, PerElement]] = {
    "eager": PerElement(36, 76, 8, 14),
    "native": PerElement(4, 10, 1, 2),
    "fused": PerElement(4, 6, 1, 2),
    "compiled": PerElement(2, 6, 1, 2),
}
# y = x + f(x): reads two, writes one; the backward adds the two gradients.
RESIDUALS: Final[Mapping[str, PerElement]] = {
    "eager": PerElement(6, 6, 1, 1),
    "compiled": PerElement(4, 4, 0, 0),
}
# silu(gate) * up. eager: two kernels forward, three backward; fused: one each way.
GATED: Final[Mapping[str, PerElement]] = {
    "eager": PerElement(10, 18, 2, 3),
    "fused": PerElement(6, 10, 1, 1),
}
PLAIN: Final = PerElement(4, 6, 1, 1)  # one activation kernel: reads and writes, backward reads two
COMPOSITE: Final = PerElement(34, 48, 8, 12)  # transformers' "gelu_new", eight operators
# Rotary embedding of queries and keys. eager: x cos + rotate_half(x) sin, five operators a tensor; complex: to fp32 pairs,
# one product, back to 16 bits; fused: one kernel a tensor.
ROTARY: Final[Mapping[str, PerElement]] = {
    "eager": PerElement(20, 20, 10, 10),
    "complex": PerElement(20, 20, 6, 6),
    "fused": PerElement(4, 4, 2, 2),
}
# Cross-entropy on 16-bit logits. full: to fp32, log-softmax, and their backward; fused: two passes in place; compiled: Inductor's.
LOSSES: Final[Mapping[str, PerElement]] = {
    "full": PerElement(18, 18, 5, 4),
    "compiled": PerElement(6, 6, 2, 1),
    "chunked": PerElement(18, 18, 20, 16),
    "chunked-output": PerElement(18, 20, 40, 33),
    "fused": PerElement(4, 4, 2, 1),
}
# Experts' rows, for each of the K copies of a token: eager: take rows, scale, add back; all-to-all: permute, sort by expert after
# the exchange, and both undone; fused: the exchange's kernel reads and writes them itself, or with permutations of their own.
# all-to-all's kernels as Megatron Core runs them with fused permutation (moe/token_dispatcher.py, moe_utils.py at d98e8a64): counts of rows
# by expert and rank 7, their copies to the host 5, permutation 4, sorting 2 and 2, exchanges 3, back in order 1; backward has no counts.
ROWS: Final[Mapping[str, PerElement]] = {
    "eager": PerElement(14, 18, 5, 6),
    "all-to-all": PerElement(16, 16, 24, 9),
    "fused": PerElement(4, 4, 2, 2),
    "fused, permuted apart": PerElement(12, 12, 4, 4),
}
PADDED: Final = PerElement(
    8, 8, 2, 2
)  # each expert's rows padded to whole blocks for a narrow format, and the padding taken off
# Kernels of the router forward and backward, and how many of them read and write the scores of all experts. eager: softmax, top-k, counts;
# fused: Transformer Engine's; megatron: operator by operator (moe/router.py, moe_utils.py at d98e8a64): scores and bias 3, top-k by
# group 9, weights and maps 11, auxiliary loss 10.
ROUTERS: Final[Mapping[str, tuple[int, int, int]]] = {
    "eager": (14, 12, 8),
    "fused": (4, 3, 2),
    "megatron": (33, 30, 18),
}
# Quantising one operand: read for the scale, read again, write it twice (as it is and transposed). Block formats need no first read.
QUANTISED: Final[Mapping[str, float]] = {"fp8": 6.0, "fp8-block": 4.0, "mxfp8": 4.0, "nvfp4": 5.0}
SCORES: Final = PerElement(
    26, 32, 5, 6
)  # attention without a fused kernel: each score written, masked, softmaxed in fp32, read

PROGRAMS: Final[Mapping[str, Program]] = {
    "hf": Program("transformers, eager", "eager", "eager", "eager", "eager", "full"),
    "liger": Program("transformers with Liger-Kernel", "fused", "eager", "fused", "fused", "fused"),
    "deepspeed": Program("transformers, eager, in DeepSpeed's engine", "eager", "eager", "eager", "eager", "full"),
    "litgpt": Program("litgpt, eager", "eager", "eager", "eager", "eager", "full"),
    "torchtune": Program("torchtune, eager", "eager", "eager", "eager", "eager", "chunked-output"),
    "torchtitan": Program("torchtitan, eager", "native", "eager", "eager", "complex", "full"),
    "fused": Program("Megatron with Transformer Engine", "fused", "eager", "fused", "fused", "fused"),
    "paper": Program("eager operators", "native", "eager", "eager", "eager", "full"),
}
COMPILED: Final = Program("torch.compile", "compiled", "compiled", "fused", "fused", "compiled")


def program_of(plan: TimePlan) -> Program:
    """The program whose operators run."""
    compiled = plan.compiled or "model" in plan.compile
    return COMPILED if compiled and plan.implementation != "fused" else PROGRAMS[plan.implementation]


def loss_of(plan: TimePlan) -> str:
    """The kind of cross-entropy: as asked for, or the program's own, which torch.compile may fuse by itself."""
    if plan.loss is not None:
        return plan.loss
    compiled = "loss" in plan.compile or (plan.compiled and plan.implementation != "fused")
    return "compiled" if compiled else PROGRAMS[plan.implementation].loss


def layer_traffic(operations: LayerOperations, plan: TimePlan, sharding: Sharding) -> tuple[Traffic, ...]:
    """The memory-bound operators of one layer on one rank."""
    layer, program = operations.kind, program_of(plan)
    width = 2 if plan.recipe == "fp32" else 1  # activations of 4 bytes
    found = [*_norms(layer, program, sharding), *_mixing(operations, plan, program, sharding)]
    found += _feed_forward(layer, plan, program, sharding)
    found += _quantised(operations.gemms, plan)
    found += _biases(operations.gemms)
    found += _adapters(operations, plan)
    return tuple(found) if width == 1 else tuple(one.scaled(width) for one in found)


def _moved(name: str, elements: float, each: PerElement) -> Traffic:
    return Traffic(name, elements * each.forward, elements * each.backward, each.forward_kernels, each.backward_kernels)


def _norms(layer: Layer, program: Program, sharding: Sharding) -> Iterator[Traffic]:
    for norm in layer.norms:
        yield _moved("norm", sharding.between * norm.size.size, _norm_kind(program, norm.style))
    hidden = _hidden(layer)
    branches = sum((layer.mixer is not None, layer.feed_forward is not None, layer.cross is not None))
    for _ in range(branches):
        yield _moved("residual", sharding.between * hidden, RESIDUALS[program.residual])


def _norm_kind(program: Program, style: str) -> PerElement:
    return NORMS["native" if program.norm == "eager" and style == "native" else program.norm]


def _hidden(layer: Layer) -> int:
    return next((norm.size.size for norm in layer.norms), 0) or getattr(
        layer.mixer or layer.feed_forward, "hidden_size", 0
    )


def _mixing(operations: LayerOperations, plan: TimePlan, program: Program, sharding: Sharding) -> Iterator[Traffic]:
    tokens = sharding.tokens
    for mixer in operations.kind.mixers:
        if isinstance(mixer, Recurrence):
            yield Traffic("recurrence", 4.0 * tokens * mixer.saved.size, 8.0 * tokens * mixer.saved.size, 4, 6)
            continue
        heads, kv = mixer.num_attention_heads / sharding.tp, max(1.0, mixer.num_key_value_heads / sharding.tp)
        if isinstance(mixer, Attention):
            turned = (heads + kv) * mixer.head_dim if mixer.rotary else 0.0
            for norm, count in ((mixer.q_norm, heads), (mixer.k_norm, kv)):
                if norm:
                    per_head = norm.size.size == mixer.head_dim
                    size = count * mixer.head_dim if per_head else norm.size.size
                    yield _moved("norm", tokens * size, _norm_kind(program, norm.style))
        else:
            rope = getattr(mixer, "qk_rope_head_dim", 0)
            turned = (heads + 1) * rope
        if isinstance(mixer, LatentAttention):
            for norm in mixer.norms:
                yield _moved("norm", sharding.between * norm.size.size, _norm_kind(program, norm.style))
            # keys are put together from the latent's part and the rotary part, values are split off
            joined = heads * (mixer.head_dim + mixer.v_head_dim)
            yield Traffic("latent_heads", 4.0 * tokens * joined, 4.0 * tokens * joined, 2, 3)
        if turned:
            yield _moved("rotary", tokens * turned, ROTARY[program.rotary])
        if plan.implementation != "fused":
            size = tokens * heads * getattr(mixer, "v_head_dim", mixer.head_dim)
            yield Traffic("transpose", 4.0 * size, 4.0 * size, 1, 1)
    for core in operations.cores:
        if plan.attention_program == "unfused":
            scores = tokens * core.heads * core.seq
            yield _moved("scores", scores, SCORES)


def _feed_forward(layer: Layer, plan: TimePlan, program: Program, sharding: Sharding) -> Iterator[Traffic]:
    feed = layer.feed_forward
    if isinstance(feed, MLP):
        yield _activation(feed, sharding.tokens, program, sharding)
    elif isinstance(feed, MoE):
        rows = sharding.between * feed.num_experts_per_tok * plan.expert_skew
        eager = plan.implementation != "fused"
        router = "eager" if eager else "fused" if plan.ep_dispatch == "fused" else "megatron"
        ahead, back, passes = ROUTERS[router]
        scores = 8.0 * sharding.between * feed.num_experts  # read and written, 32 bits
        yield Traffic("router", passes * scores, passes * scores, ahead, back)
        exchange = "eager" if eager else "all-to-all"
        if plan.ep_dispatch == "fused":
            exchange = "fused" if plan.expert_program == "fused" else "fused, permuted apart"
        yield replace(_moved("permutation", rows * feed.expert.hidden_size, ROWS[exchange]), of_experts=True)
        per_rank = sharding.tokens * feed.num_experts_per_tok * plan.expert_skew
        if quantised_format(plan) and plan.expert_program == "separate":
            yield replace(_moved("padding", per_rank * feed.expert.hidden_size, PADDED), of_experts=True)
        if plan.expert_program != "fused":
            yield replace(_activation(feed.expert, per_rank, program, sharding), of_experts=True)
        if feed.shared:
            yield _activation(feed.shared, sharding.tokens, program, sharding)


def _activation(mlp: MLP, tokens: float, program: Program, sharding: Sharding) -> Traffic:
    if mlp.gated:
        kind = GATED[program.activation]
    else:
        kind = COMPOSITE if mlp.activation == "gelu_new" and program.activation == "eager" else PLAIN
    return _moved("activation", tokens * ceil_div(mlp.intermediate_size, sharding.tp), kind)


def quantised_format(plan: TimePlan) -> str | None:
    """The format below 16 bits that the layers' products take, which each operand is cast to; None for 16 and 32 bits."""
    return plan.compute_format if plan.compute_format in QUANTISED else None


def _quantised(gemms: tuple[Gemm, ...], plan: TimePlan) -> Iterator[Traffic]:
    """Casts of each product's input, and in backward of its output's gradient. Weights are cast once a step."""
    name = quantised_format(plan)
    if name is None:
        return
    each, kernels = QUANTISED[name], 2 if name == "fp8" else 1
    for gemm in gemms:
        experts = gemm.part == "experts"
        if not takes_low_precision(gemm) or (experts and plan.expert_program == "fused"):
            continue
        launches = kernels * (gemm.groups if experts and plan.expert_program == "separate" else 1)
        forward, backward = (each * gemm.m * gemm.groups * width for width in (gemm.k, gemm.n))
        yield Traffic("quantise", forward, backward, launches, launches, experts)


def takes_low_precision(gemm: Gemm) -> bool:
    """Whether a product runs in the plan's narrow format: routers and heads stay in 16 bits (Transformer Engine, torchao)."""
    return gemm.part not in ("router", "head") and min(gemm.n, gemm.k) >= 128


def _biases(gemms: tuple[Gemm, ...]) -> Iterator[Traffic]:
    """A bias is added in the product's epilogue; its gradient sums the output's gradient once more."""
    for gemm in gemms:
        if gemm.bias:
            yield Traffic("bias", 0.0, 2.0 * gemm.m * gemm.n, 0, 1)


def _adapters(operations: LayerOperations, plan: TimePlan) -> Iterator[Traffic]:
    """LoRA on a product reads its input, writes and reads r features, and adds to its output; its backward does so twice. QLoRA makes
    16-bit weights of 4-bit ones before each product. The products of rank r themselves are bound by these bytes."""
    lora = plan.lora
    if lora is None:
        return
    modules = tuple(weight.module for part in operations.kind.parts for weight in part.weights)
    for gemm in operations.gemms:
        if plan.method == "qlora" and gemm.part != "head":
            size = 2.5 * gemm.n * gemm.k * gemm.groups
            yield Traffic("dequantise", size, size, 1, 1)
        if gemm.module and gemm.part != "experts" and lora.takes(modules, gemm.module):
            forward = 2.0 * gemm.m * gemm.k + 8.0 * gemm.m * gemm.n
            yield Traffic("adapter", forward, forward + 2.0 * gemm.m * gemm.k, 4, 8)
