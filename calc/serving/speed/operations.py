"""The operations of one step of a served model on one rank, each with the seconds that measured kernels give it.

A step computes some sequences that decode (one token each, or a few with a draft) and some that prefill. Most operations see
only how many tokens there are; attention and recurrences see the sequences. Collectives are those of tensor, expert and
data-parallel attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from calc.kernel_times import KernelTimes
from calc.model.feed_forward import MLP, MoE
from calc.model.mixers import Attention, CompressedAttention, Indexer, LatentAttention, Mixer, Recurrence
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Part, Split, Weight
from calc.serving.formats import WeightFormat
from calc.serving.speed.precision import gemm_format
from calc.serving.speed.recurrences import recurrence
from calc.serving.speed.work import BYTES, Array, Layout, SequenceWork, TokenWork, Work
from calc.units import ceil_div

_KV = {"fp32": "bf16", "q8_0": "int8", "q5_1": "int4", "q5_0": "int4", "q4_1": "int4", "q4_0": "int4"}  # read as
_QUANTISED = (
    "fp8_block",
    "nvfp4",
)  # the input is quantised by a kernel of its own (vLLM, SGLang; in TensorRT-LLM's tables with the matmul)


@dataclass(frozen=True, slots=True)
class Operations:
    """The operations of one rank; `form` and `kv` are the formats of the weights and of the cache."""

    spec: ModelSpec
    layout: Layout
    times: KernelTimes
    form: WeightFormat
    kv: str
    query: int = 1  # tokens of one sequence in a decode step: 1 and the draft's

    @property
    def cache(self) -> str:
        """The cache's format as the kernels read it."""
        return _KV.get(self.kv, self.kv)

    def all(self) -> tuple[Work, ...]:
        """Every operation of a step, but the head: that sees only the sequences that sample."""
        found: list[Work] = [self._embedding()]
        kinds = list(zip(self.spec.layers.kinds, self.spec.layers.kind_parts, self.spec.layers.counts, strict=True))
        names = _unique([kind.kind for kind, _, _ in kinds])
        for name, (kind, parts, count) in zip(names, kinds, strict=True):
            prefix = "layers" if len(kinds) == 1 else f"layers/{name}"
            for work in self._layer(kind, parts):
                found.append(_placed(work, prefix, count))
        if self.layout.pp > 1:
            found.append(TokenWork("pipeline/send", self.layout.pp - 1, self._send))
        return tuple(found)

    def head(self, sequences: Array) -> Array:
        """Logits and sampling of so many sequences: the head is divided by the vocabulary, its logits are gathered."""
        spec, tp = self.spec, self.layout.tp
        if not spec.has_head:
            return np.zeros_like(sequences)
        logits = sequences * spec.vocab_size
        seconds = self.times.gemm(sequences, ceil_div(spec.vocab_size, tp), spec.hidden_size, dtype="bf16")
        if tp > 1:
            seconds = seconds + self.times.collective("all_gather", logits * BYTES, tp)
        # greedy or random sampling reads the logits in fp32 a few times: cast, softmax, the choice
        return seconds + self.times.memory_bound(logits * 2, logits * 4) + self.times.memory_bound(logits * 4)

    def draft(self, sequences: Array) -> Array:
        """One pass of the draft for so many sequences: a layer like the model's last and the head (multi-token prediction, EAGLE)."""
        last = self.spec.layers.pattern[-1]
        works = self._layer(self.spec.layers.kinds[last], self.spec.layers.kind_parts[last])
        tokens = [work for work in works if isinstance(work, TokenWork)]
        dp = self.layout.dp
        return self.head(sequences) + sum(work.seconds(sequences * (dp if work.of_replica else 1)) for work in tokens)

    def _format(self, kind: Layer, part: Part, weight: Weight) -> str:
        return gemm_format(self.spec, self.form, kind, part, weight, self.times.gpu)

    def _embedding(self) -> TokenWork:
        h, tp = self.spec.hidden_size, self.layout.tp

        def seconds(tokens: Array) -> Array:
            look_up = self.times.memory_bound(tokens * h * BYTES, tokens * h * BYTES)
            return look_up + self._all_reduce(tokens) if tp > 1 else look_up

        return TokenWork("embedding", 1, seconds)

    def _layer(self, kind: Layer, parts: tuple[Part, ...]) -> Iterator[Work]:
        for mixer in kind.mixers:
            yield self._norm("norms/mixer")
            own = {part.name for part in mixer.parts}
            yield from self._mixer(kind, mixer, [part for part in parts if part.name in own])
            if self.layout.tp > 1:
                yield TokenWork("all_reduce/mixer", 1, self._all_reduce)
        if kind.feed_forward:
            yield self._norm("norms/feed_forward")
            yield from self._feed_forward(kind, kind.feed_forward, parts)

    def _norm(self, path: str) -> TokenWork:
        """The norm with the residual added: reads both, writes both."""
        size = self.spec.hidden_size * BYTES * 2
        return TokenWork(path, 1, lambda tokens: self.times.memory_bound(tokens * size, tokens * size))

    def _pass(self, read: float, write: float) -> Callable[[Array], Array]:
        """One kernel that reads and writes so many bytes of each token."""
        return lambda tokens: self.times.memory_bound(tokens * read, tokens * write)

    def _send(self, tokens: Array) -> Array:
        return self.times.collective("send", tokens * self.spec.hidden_size * BYTES, 2)

    def _all_reduce(self, tokens: Array) -> Array:
        return self._reduced(tokens * self.spec.hidden_size * BYTES)

    def _reduced(self, size: Array) -> Array:
        """An all-reduce of so many bytes over the tensor-parallel ranks: the engine's own kernel or NCCL, whichever is faster."""
        ranks = self.layout.tp
        return np.minimum(
            self.times.collective("all_reduce", size, ranks, kernel="custom"),
            self.times.collective("all_reduce", size, ranks),
        )

    # mixers

    def _mixer(self, kind: Layer, mixer: Mixer, parts: list[Part]) -> Iterator[Work]:
        if isinstance(mixer, LatentAttention):
            yield from self._latent(kind, mixer, parts)
            return
        for part in parts:
            yield from self._matmuls(kind, part)
        if isinstance(mixer, Recurrence):
            yield self._recurrence(mixer)
            output = next((weight.shape[-1].size for weight in mixer.weights if weight.split is Split.INPUT), 0)
            width = output // self.layout.tp * BYTES
            yield TokenWork(f"{mixer.kind}/gated_norm", 1, self._pass(2 * width, width))
        elif isinstance(mixer, Attention):
            yield from self._rotary(mixer)
            yield self._attention(mixer)
            if mixer.gated:
                width = ceil_div(mixer.num_attention_heads, self.layout.tp) * mixer.head_dim * BYTES
                yield TokenWork("attention/gate", 1, self._pass(2 * width, width))
            if mixer.indexer:
                yield from self._index(mixer.indexer)
        elif isinstance(mixer, CompressedAttention):
            yield self._compressed(mixer)
            if mixer.indexer:
                yield from self._index(mixer.indexer)

    def _matmuls(self, kind: Layer, part: Part, skip: frozenset[str] = frozenset()) -> Iterator[TokenWork]:
        """The part's matmuls; weights that read the same input run as one."""
        fused: dict[tuple[int, bool, str], list[Weight]] = {}
        for weight in part.weights:
            if weight.matmul and weight.name not in skip:
                form = self._format(kind, part, weight)
                key = (weight.shape[-1].size, weight.split is Split.INPUT, form)
                fused.setdefault(key, []).append(weight)
        kv = getattr(kind.mixer, "num_key_value_heads", 0) or 1
        for (inputs, row_parallel, form), weights in fused.items():
            n = sum(self._outputs(weight, kv) for weight in weights)
            k = ceil_div(inputs, self.layout.tp) if row_parallel else inputs
            name = "_".join(weight.name for weight in weights)
            if form in _QUANTISED and self.times.engine != "trtllm":
                yield TokenWork(f"{part.name}/quantise", 1, self._pass(k * BYTES, k))
            yield TokenWork(f"{part.name}/{name}", 1, _gemm(self.times, n, k, form))

    def _outputs(self, weight: Weight, kv: int) -> int:
        size = weight.shape[0].size
        if weight.split is Split.KV:
            return ceil_div(size, min(self.layout.tp, kv))
        return ceil_div(size, self.layout.tp) if weight.split in (Split.OUTPUT, Split.VOCAB) else size

    def _rotary(self, mixer: Attention) -> Iterator[TokenWork]:
        """Query and key norms, rotation, and the write to the cache: passes over queries, keys and values. A norm over all heads at
        once (MiniMax-M2) needs the sums of all ranks."""
        heads = ceil_div(mixer.num_attention_heads, self.layout.tp)
        kv = max(1, mixer.num_key_value_heads // self.layout.tp)
        size = (heads + 2 * kv) * mixer.head_dim * BYTES
        yield TokenWork("attention/rotary", 1, self._pass(size, size))
        if mixer.q_norm:
            yield TokenWork("attention/norms", 1, self._pass(size, size))
            if self.layout.tp > 1 and mixer.q_norm.size.size > mixer.head_dim:
                yield TokenWork("all_reduce/norms", 1, lambda tokens: self._reduced(tokens * 8))

    def _attention(self, mixer: Attention) -> SequenceWork:
        heads = ceil_div(mixer.num_attention_heads, self.layout.tp)
        kv = max(1, mixer.num_key_value_heads // self.layout.tp)
        window = mixer.window or mixer.chunk
        top = mixer.indexer.topk if mixer.indexer else 0
        times = self.times

        def decode(batch: Array, context: Array) -> Array:
            met = np.minimum(context, top) if top else context
            return times.decode_attention(
                batch=batch,
                context=met,
                heads=heads,
                kv_heads=kv,
                head_dim=mixer.head_dim,
                kv_dtype=self.cache,
                window=window,
            )

        def prefill(batch: Array, new: Array, context: Array) -> Array:
            return times.context_attention(
                batch=batch,
                query=new,
                context=context,
                heads=heads,
                kv_heads=kv,
                head_dim=mixer.head_dim,
                kv_dtype=self.cache,
                window=window,
            )

        return SequenceWork("attention/core", 1, decode, prefill)

    def _latent(self, kind: Layer, mixer: LatentAttention, parts: list[Part]) -> Iterator[Work]:
        """MLA: absorbed in decode (the latents are keys and values of one head), expanded in prefill."""
        heads = ceil_div(mixer.num_attention_heads, self.layout.tp)
        rank, nope, v = mixer.kv_lora_rank, mixer.qk_nope_head_dim, mixer.v_head_dim
        skip = frozenset(("key_value_up",))
        for part in parts:
            yield from self._matmuls(kind, part, skip)
        up = next(weight for weight in parts[0].weights if weight.name == "key_value_up")
        form = self._format(kind, parts[0], up)
        times, kv, query = self.times, self.cache, self.query
        top = mixer.indexer.topk if mixer.indexer else 0
        width = heads * (mixer.head_dim + v) * BYTES
        yield TokenWork("attention/rotary", 1, lambda tokens: times.memory_bound(tokens * width, tokens * width))
        absorb_k, absorb_v = _gemm(times, heads * rank, nope, "bf16"), _gemm(times, heads * v, rank, "bf16")
        expand = _gemm(times, heads * (nope + v), rank, form)

        def decode(batch: Array, context: Array) -> Array:
            met = np.minimum(context, top) if top else context
            core = times.mla_decode(
                batch=batch * query,
                context=met,
                heads=heads,
                kv_lora_rank=rank,
                qk_rope=mixer.qk_rope_head_dim,
                kv_dtype=kv,
            )
            return core + absorb_k(batch * query) + absorb_v(batch * query)

        def prefill(batch: Array, new: Array, context: Array) -> Array:
            core = times.mla_context(
                batch=batch,
                query=new,
                context=context,
                heads=heads,
                qk_nope=nope,
                qk_rope=mixer.qk_rope_head_dim,
                v_head=v,
                kv_dtype=kv,
            )
            return core + expand(batch * (new + context))

        yield SequenceWork("attention/core", 1, decode, prefill)
        if mixer.indexer:
            yield from self._index(mixer.indexer)

    def _index(self, indexer: Indexer) -> Iterator[Work]:
        """The indexer scores every key: 1 byte a feature and one fp32 scale, read in each step; matmuls in fp8. Before that its key is
        normalised, and queries and key are rotated, mixed by a Hadamard transform and quantised (DeepSeek-V3.2-Exp, model.py)."""
        width = (indexer.heads + 1) * indexer.head_dim * BYTES
        yield TokenWork("indexer/prepare", 4, self._pass(width, width))
        size, heads, times, query = indexer.head_dim + 4, indexer.heads, self.times, self.query

        def decode(batch: Array, context: Array) -> Array:
            scores = times.memory_bound(batch * context * size, batch * context * query * 4)
            return scores + times.memory_bound(batch * context * query * 4, batch * query * indexer.topk * 4)

        def prefill(batch: Array, new: Array, context: Array) -> Array:
            keys = np.maximum(context + new / 2, 1)
            scores = times.gemm(batch * new, keys, heads * indexer.head_dim, dtype="fp8")
            return scores + times.memory_bound(batch * new * keys * 4, batch * new * indexer.topk * 4)

        yield SequenceWork("indexer/scores", 1, decode, prefill)

    def _compressed(self, mixer: CompressedAttention) -> SequenceWork:
        """DeepSeek-V4: a window and the compressed entries, with one head of keys that serve as values."""
        heads, every = ceil_div(mixer.num_attention_heads, self.layout.tp), mixer.compress
        top = mixer.indexer.topk if mixer.indexer else 0
        times, size, kv = self.times, mixer.head_dim, self.cache

        def met(context: Array) -> Array:
            entries = context / every if every else context * 0
            return np.minimum(context, mixer.window) + (np.minimum(entries, top) if top else entries)

        def decode(batch: Array, context: Array) -> Array:
            keys = met(context)
            return times.decode_attention(
                batch=batch, context=keys, heads=heads, kv_heads=1, head_dim=size, kv_dtype=kv
            )

        def prefill(batch: Array, new: Array, context: Array) -> Array:
            keys = met(context + new / 2)
            return times.context_attention(
                batch=batch, query=new, context=keys, heads=heads, kv_heads=1, head_dim=size, kv_dtype=kv, causal=False
            )

        return SequenceWork("attention/core", 1, decode, prefill)

    def _recurrence(self, mixer: Recurrence) -> SequenceWork:
        """The scan: decode reads and writes every state, prefill computes in chunks. A state's heads are divided over the ranks."""
        return recurrence(self.times, mixer, self.layout.tp)

    # feed-forward

    def _feed_forward(self, kind: Layer, feed_forward: MLP | MoE, parts: tuple[Part, ...]) -> Iterator[Work]:
        if isinstance(feed_forward, MLP):
            part = next(part for part in parts if part.name == "mlp")
            yield from self._mlp(kind, part, feed_forward)
            if self.layout.tp > 1:
                yield TokenWork("all_reduce/feed_forward", 1, self._all_reduce)
            return
        yield from self._experts(kind, feed_forward, parts)

    def _mlp(self, kind: Layer, part: Part, mlp: MLP) -> Iterator[TokenWork]:
        yield from self._matmuls(kind, part)
        width = ceil_div(mlp.intermediate_size, self.layout.tp) * BYTES
        read = width * (2 if mlp.gated else 1)
        yield TokenWork(
            f"{part.name}/activation", 1, lambda tokens: self.times.memory_bound(tokens * read, tokens * width)
        )

    def _experts(self, kind: Layer, moe: MoE, parts: tuple[Part, ...]) -> Iterator[Work]:
        layout, times, h = self.layout, self.times, self.spec.hidden_size
        by_name = {part.name: part for part in parts}
        yield from self._matmuls(kind, by_name["router"])
        yield TokenWork("router/choice", 1, self._pass(moe.num_experts * 4, moe.num_experts_per_tok * 8))
        experts = by_name["experts"]
        weight = next(weight for weight in experts.weights if weight.matmul)
        form = self._format(kind, experts, weight)
        if layout.dp > 1:
            yield TokenWork("all_to_all/dispatch", 1, self._dispatch(form), of_replica=True)

        def seconds(tokens: Array) -> Array:
            return times.experts(
                tokens=tokens,
                hidden=h,
                intermediate=moe.expert.intermediate_size,
                num_experts=moe.num_experts,
                top_k=moe.num_experts_per_tok,
                ep=layout.ep,
                tp=layout.expert_tp,
                dtype=form,
                skew="power_law",
            )

        yield TokenWork("experts", 1, seconds, of_replica=True)
        if moe.shared and "shared_expert" in by_name:
            yield from self._mlp(kind, by_name["shared_expert"], moe.shared)
            yield TokenWork("shared_expert/sum", 2 if moe.shared_gate else 1, self._pass(2 * h * BYTES, h * BYTES))
        if layout.dp > 1:
            yield TokenWork("all_to_all/combine", 1, self._combine, of_replica=True)
        elif layout.tp > 1:
            yield TokenWork("all_reduce/feed_forward", 1, self._all_reduce)

    def _dispatch(self, form: str) -> Callable[[Array], Array]:
        """Attention ranks gather each other's tokens before the experts, in the format that the experts read."""
        size = self.spec.hidden_size * {"fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5625}.get(form, 2.0)
        return lambda tokens: self.times.collective("all_gather", tokens * size, self.layout.ranks)

    def _combine(self, tokens: Array) -> Array:
        return self.times.collective("reduce_scatter", tokens * self.spec.hidden_size * BYTES, self.layout.ranks)


def _gemm(times: KernelTimes, n: int, k: int, form: str) -> Callable[[Array], Array]:
    return lambda tokens: times.gemm(tokens, n, k, dtype=form)


def _placed(work: Work, prefix: str, count: int) -> Work:
    changes: dict[str, Any] = {"path": f"{prefix}/{work.path}", "count": work.count * count}
    return replace(work, **changes)


def _unique(names: list[str]) -> list[str]:
    return [
        name if names.index(name) == at else f"{name}_{names[: at + 1].count(name)}" for at, name in enumerate(names)
    ]
