"""A small decoder of torchtitan's structure in plain PyTorch, and its step run with fake tensors: the witness of the formula.

What torchtitan 0.2.2 does is done here by the same means: RMS norms as one operator (CUDA's), rotary positions as complex numbers
in fp32 or by cosines and sines, checkpoints around each block with per-op selection, FSDP2 around each checkpoint,
around the embedding, and around final norm and head together; the loss outside the model, on logits in fp32.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, _CachedTorchDispatchMode, create_selective_checkpoint_contexts

from measure.trace.cuda import cuda_choices
from measure.trace.recorder import Recorder
from measure.trace.sharding import process_group

aten = torch.ops.aten
KEPT = {
    aten.mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
    aten.max.default,
}


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: ranks of queries (0: none) and of keys and values, sizes of a head's parts."""

    query_rank: int
    rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Experts:
    count: int
    chosen: int
    width: int
    shared: int = 0
    normalised: bool = False
    dense: int = 0  # layers without experts that come first
    ep: int = 1  # ranks that share them
    added: bool = False  # outputs are weighted each and added, as before November 2025


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    layers: int
    vocabulary: int
    cosines: bool = False  # Qwen3: norms on heads, rotary positions by cosines and sines
    latent: Latent | None = None
    experts: Experts | None = None


class _FusedRms(torch.autograd.Function):
    """aten::_fused_rms_norm as CUDA has it: its output and an inverse root in fp32 for each row. The CPU's is a composition."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x):
        if isinstance(x, DTensor):
            y = _FusedRms.apply(x.to_local(), self.weight.to_local())
            return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False)
        return _FusedRms.apply(x, self.weight)


def _turn_complex(query, key, table):
    def pairs(x):
        return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))

    query_pairs, key_pairs = pairs(query), pairs(key)
    table = table[: query.shape[1]].view(1, query.shape[1], 1, -1)
    turned_query = torch.view_as_real(query_pairs * table).flatten(3)
    turned_key = torch.view_as_real(key_pairs * table).flatten(3)
    return turned_query.type_as(query), turned_key.type_as(key)


def _turn_cosines(query, key, table):
    size = query.shape[-1]
    table = table[: query.shape[1]].view(-1, query.shape[1], 1, 2 * size)
    cosines, sines = table[..., :size].to(query.dtype), table[..., size:].to(query.dtype)

    def turned(x):
        def swapped():
            return torch.cat((-x[..., size // 2 :], x[..., : size // 2]), dim=-1)

        return (x * cosines) + (swapped() * sines)

    return turned(query), turned(key)


class Attention(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.head, self.grouped, self.cosines = shape.head, shape.heads > shape.kv_heads, shape.cosines
        self.query = nn.Linear(shape.hidden, shape.heads * shape.head, bias=False)
        self.key = nn.Linear(shape.hidden, shape.kv_heads * shape.head, bias=False)
        self.value = nn.Linear(shape.hidden, shape.kv_heads * shape.head, bias=False)
        self.output = nn.Linear(shape.heads * shape.head, shape.hidden, bias=False)
        if shape.cosines:
            self.query_norm, self.key_norm = Norm(shape.head), Norm(shape.head)

    def forward(self, x, table):
        batch, tokens, _ = x.shape
        query, key, value = self.query(x), self.key(x), self.value(x)
        query = query.view(batch, tokens, -1, self.head)
        key = key.view(batch, tokens, -1, self.head)
        value = value.view(batch, tokens, -1, self.head)
        if self.cosines:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = (_turn_cosines if self.cosines else _turn_complex)(query, key, table)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        return self.output(mixed.transpose(1, 2).contiguous().view(batch, tokens, -1))


class FeedForward(nn.Module):
    def __init__(self, shape, width):
        super().__init__()
        self.gate = nn.Linear(shape.hidden, width, bias=False)
        self.down = nn.Linear(width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.hidden, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape, index):
        from tests.measure import torchtitan_experts as others

        super().__init__()
        self.attention = others.LatentAttention(shape) if shape.latent else Attention(shape)
        dense = shape.experts is None or index < shape.experts.dense
        self.feed_forward = FeedForward(shape, shape.intermediate) if dense else others.Experts(shape)
        self.attention_norm, self.feed_forward_norm = Norm(shape.hidden), Norm(shape.hidden)

    def forward(self, x, table):
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    def __init__(self, shape, longest):
        super().__init__()
        head = shape.latent.rope if shape.latent else shape.head
        size = (longest, 2 * shape.head) if shape.cosines else (longest, head // 2)
        self.register_buffer("table", torch.empty(size, dtype=torch.float32 if shape.cosines else torch.complex64))
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Block(shape, index) for index in range(shape.layers))
        self.norm = Norm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, self.table)
        hidden = self.norm(hidden)
        return self.head(hidden)


def _divided(model, mesh):
    """Tensor parallelism with the sequence divided between the blocks, and logits divided over the vocabulary."""
    rows, columns = RowwiseParallel(output_layouts=Shard(1)), ColwiseParallel()
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"embedding": embedding, "norm": SequenceParallel(), "head": head})
    plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "attention.output": rows,
        "feed_forward.down": rows,
    }
    plan |= {f"attention.{name}": columns for name in ("query", "key", "value")}
    plan |= {f"feed_forward.{name}": columns for name in ("gate", "up")}
    for block in model.layers:
        parallelize_module(block, mesh, plan)


def _selected():
    """Keep what costs most to make again, but only every second matmul, from the first."""
    matmuls = defaultdict(int)

    def policy(context, operator, *args, **kwargs):
        if operator is aten.mm.default:
            matmuls[context.is_recompute] += 1
        second = operator is aten.mm.default and matmuls[context.is_recompute] % 2 == 0
        kept = operator in KEPT and not second
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    first, again = create_selective_checkpoint_contexts(policy)
    again.__class__ = _Again
    return first, again


class _Again(_CachedTorchDispatchMode):
    """The second run under selection. Experts that are gathered inside a checkpoint run other operators of FSDP then: they are run."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return super().__torch_dispatch__(func, types, args, kwargs) if func in KEPT else func(*args, **(kwargs or {}))


def _experts_sharded(model, mesh, options):
    """The experts of each layer over the ranks that hold the same ones, and what each layer gathers ahead."""
    layers = [getattr(layer, "_checkpoint_wrapped_module", layer) for layer in model.layers]
    for layer in layers:
        if hasattr(layer.feed_forward, "grouped"):
            grouped = layer.feed_forward.grouped
            grouped.group = mesh["ep"].get_group()
            inside = mesh["efsdp"].size() > grouped.count
            place = {"shard_placement_fn": lambda parameter: Shard(1)} if inside else {}
            fully_shard(grouped, **{**options, "mesh": mesh["efsdp"]}, **place)


def _gathered_ahead(model):
    layers = list(model.layers)

    def parts(layer):
        inner = getattr(layer, "_checkpoint_wrapped_module", layer).feed_forward
        return [layer, *([inner.grouped] if hasattr(inner, "grouped") else [])]

    model.embedding.set_modules_to_forward_prefetch([layers[0]])
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch(parts(following))
        following.set_modules_to_backward_prefetch(parts(layer))
    layers[-1].set_modules_to_forward_prefetch([model.norm])
    model.norm.set_modules_to_backward_prefetch([layers[-1]])
    layers[0].set_modules_to_backward_prefetch([model.embedding])


def _prepared(model, mesh, recompute, reshard, every, sparse=None):
    for index, block in enumerate(model.layers):
        if recompute != "none" and not (index + 1) % every:
            chosen = {"context_fn": _selected} if recompute == "selective" else {}
            model.layers[index] = checkpoint_wrapper(block, preserve_rng_state=False, **chosen)
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    if sparse is not None:
        _experts_sharded(model, sparse, {**options, "reshard_after_forward": reshard})
    for module in (model.embedding, *model.layers):
        fully_shard(module, reshard_after_forward=reshard, **options)
    fully_shard([model.norm, model.head], reshard_after_forward=False, **options)
    fully_shard(model, **options)
    if sparse is not None:
        _gathered_ahead(model)


class _Recorder(Recorder):
    """Looks away while DTensor asks fake tensors of the whole size for shapes, which takes no memory, and lets waiting for a
    collective answer what it is given, as a device does; its description for fake tensors makes a copy."""

    asking = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        if self.asking:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextlib.contextmanager
    def looking_away(self):
        ask = ShardingPropagator._propagate_tensor_meta_non_cached

        def asked(propagator, schema):
            self.asking, before = True, self.asking
            try:
                return ask(propagator, schema)
            finally:
                self.asking = before

        ShardingPropagator._propagate_tensor_meta_non_cached = asked
        try:
            yield
        finally:
            ShardingPropagator._propagate_tensor_meta_non_cached = ask


@dataclass
class Seen:
    """Bytes of one step: the highest point of each phase, and what lives at the end of forward and before it."""

    phases: dict[str, int]
    before: int
    after_forward: int
    after_backward: int


def run(
    shape: Shape,
    batch: int,
    tokens: int,
    ranks: int,
    recompute: str,
    reshard: bool = True,
    tp: int = 1,
    every: int = 1,
    parts: int = 1,
) -> Seen:
    """The second of two steps, every storage rounded up to 512 bytes. `every`: one layer of so many has a checkpoint. `parts`: chunks of
    the logits whose losses are added."""
    recorder = _Recorder({}, 512, False)
    divided = loss_parallel() if tp > 1 else contextlib.nullcontext()
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "FSDP2-wrapped module .* returned a view"
        )  # of a DTensor, never written in place
        stack.enter_context(cuda_choices())
        stack.enter_context(process_group(ranks * tp))
        mesh = init_device_mesh("cpu", (ranks, tp), mesh_dim_names=("shards", "tp"))
        with torch.device("meta"):
            model = Decoder(shape, tokens)
        if tp > 1:
            _divided(model, mesh["tp"])
        ep = shape.experts.ep if shape.experts else 1
        sparse = init_device_mesh("cpu", (ranks // ep, ep), mesh_dim_names=("efsdp", "ep")) if ep > 1 else None
        _prepared(model, mesh["shards"], recompute, reshard, every, sparse)
        for context in (
            FakeTensorMode(allow_non_fake_inputs=True),
            recorder,
            recorder.resizes(),
            recorder.looking_away(),
            divided,
        ):
            stack.enter_context(context)
        model.to_empty(device="cpu")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids, labels = (torch.zeros((batch, tokens), dtype=torch.int64) for _ in range(2))
        for _ in range(2):
            seen = _step(recorder, model, optimizer, ids, labels, parts)
    return seen


def _step(
    recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, labels: Tensor, parts: int
) -> Seen:
    optimizer.zero_grad()
    gc.collect()
    before, start = _live(recorder), len(recorder.events)
    after_forward, _loss = _forward_and_backward(recorder, model, ids, labels, parts)
    after_backward = _live(recorder)
    recorder.begin("step")
    optimizer.step()
    total, phases = before, {"forward": before, "backward": after_forward, "step": after_backward}
    for event in recorder.events[start:]:
        total += event.sign * event.storage.nbytes
        phases[event.site.phase] = max(phases[event.site.phase], total)
    return Seen(phases, before, after_forward, after_backward)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum")


def _forward_and_backward(
    recorder: Recorder, model: nn.Module, ids: Tensor, labels: Tensor, parts: int
) -> tuple[int, Tensor]:
    recorder.begin("forward")
    logits = model(ids)
    loss_sum = (
        _loss(logits, labels) if parts == 1 else sum(map(_loss, logits.chunk(parts, dim=1), labels.chunk(parts, dim=1)))
    )
    loss = loss_sum / labels.numel()
    del logits
    after_forward = _live(recorder)
    recorder.begin("backward")
    loss.backward()
    return after_forward, loss


def _live(recorder: Recorder) -> int:
    return sum(storage.nbytes for storage in recorder.live())


def chunked_loss(hidden: int, vocabulary: int, tokens: int, parts: int) -> int:
    """The highest point of torchtitan's ChunkedLossWrapper over what was there before: head and loss of a chunk after the other, forward
    and backward. FSDP keeps the head's gradient of the chunks before in fp32, and reduces it from a buffer with the last."""
    recorder = _Recorder({}, 512, False)
    with cuda_choices(), FakeTensorMode(allow_non_fake_inputs=True), recorder:
        head = nn.Linear(hidden, vocabulary, bias=False, dtype=torch.bfloat16)
        states = torch.zeros(1, tokens, hidden, dtype=torch.bfloat16)
        labels = torch.zeros(1, tokens, dtype=torch.int64)
        recorder.begin("forward")
        before, start = _live(recorder), len(recorder.events)
        chunks = [chunk.detach().contiguous().clone().requires_grad_() for chunk in states.chunk(parts, dim=1)]
        sums = torch.zeros_like(states, dtype=torch.float32)
        total = None
        for place, (chunk, label) in enumerate(zip(chunks, labels.chunk(parts, dim=1), strict=True)):
            logits = head(chunk)
            _loss(logits, label).backward()
            if total is None:
                total = head.weight.grad.to(torch.float32)
            else:
                total += head.weight.grad
            head.weight.grad = None
            size = tokens // parts
            sums[:, place * size : (place + 1) * size] = chunk.grad
            chunk.grad = None
        reduced = torch.empty_like(total)
        del logits, total, reduced
        gradient = sums.to(torch.bfloat16)
        highest = now = before
        for event in recorder.events[start:]:
            now += event.sign * event.storage.nbytes
            highest = max(highest, now)
        del gradient
    return highest - before
