"""The KV cache: what each layer keeps of a sequence on one GPU, exact to the byte.

Attention keeps keys and values of its KV heads, latent attention one latent and one rotary key, a window at most its
own tokens, a recurrence a state of fixed size. Per layer it is affine in the tokens until a window is full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from calc.breakdown import Component, Formula, Number
from calc.dtypes import DTYPES
from calc.model.mixers import Attention, CompressedAttention, Indexer, LatentAttention, Mixer, Recurrence
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Split
from calc.serving.formats import KV_ASSUMES, KV_FORMATS, MLX_KV, Bits, plain
from calc.serving.plan import MOST_TOKENS, ServingPlan
from calc.units import ceil_div, round_up

_STEP = 256  # mlx-lm's caches grow by so many tokens (models/cache.py)
CELLS = 256  # llama.cpp pads the cache of a stream to so many cells

_GQA = ("GQA, arXiv 2305.13245, section 2", "https://arxiv.org/abs/2305.13245")
_MLA = ("DeepSeek-V2, arXiv 2405.04434, section 2.1", "https://arxiv.org/abs/2405.04434")
_WINDOW = ("Mistral 7B, arXiv 2310.06825, section 2: rolling buffer cache", "https://arxiv.org/abs/2310.06825")
_STREAMING = ("StreamingLLM, arXiv 2309.17453, section 3", "https://arxiv.org/abs/2309.17453")
_INDEXER = ("DeepSeek-V3.2-Exp: the indexer keeps one key a token", "https://github.com/deepseek-ai/DeepSeek-V3.2-Exp")
_V4 = (
    "DeepSeek-V4, section 2.3; transformers 5.24, models/deepseek_v4",
    "https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro",
)
_PACKED = (
    "vLLM, fp8_ds_mla: 656 bytes a token and layer for DeepSeek-V3.2, and 132 for the indexer",
    "https://github.com/vllm-project/vllm",
)
_RECURRENT = (
    "llama.cpp, src/llama-memory-recurrent.cpp and llama-hparams.cpp: n_embd_r and n_embd_s in F32",
    "https://github.com/ggml-org/llama.cpp",
)
_COPIED = "every tensor-parallel rank keeps a full copy"
_WINDOW_FULL = "a window of W keeps W tokens, the newest included (Hugging Face's DynamicCache drops the oldest between steps: W - 1)"


@dataclass(frozen=True, slots=True)
class Kept:
    """One tensor that a layer keeps of one sequence. `elements` are of one token, or of the whole where `fixed`.

    `most` is the tokens kept at most (0: all); `letter` names it. Each `every` tokens leave one entry of `elements`. `of_prompt`:
    it holds the encoder's tokens instead. `taps`: it is the last inputs of a convolution with so many taps.
    """

    name: str
    elements: int
    latex: str
    numbers: tuple[tuple[str, Number], ...]
    source: tuple[str, str]
    assumes: tuple[str, ...] = ()
    most: int = 0
    letter: str = "W"
    every: int = 1
    fixed: bool = False
    of_prompt: bool = False
    taps: int = 0
    bits: Bits | None = None  # its own format; None: the cache's


@lru_cache(maxsize=64)
def kept_tensors(
    spec: ModelSpec, tp: int, keep_window: int, keep_sinks: int, packed: bool, cells: bool = False
) -> tuple[tuple[Kept, ...], ...]:
    """What each kind of layer keeps on one of `tp` ranks; `packed`: latents and index keys in vLLM's fp8_ds_mla layout;
    `cells`: recurrent states as llama.cpp keeps them. An encoder keeps nothing: it generates nothing."""
    if not spec.generates:
        return ((),) * len(spec.layers.kinds)
    kinds = (tuple(_kept(spec, kind, tp, keep_window, keep_sinks)) for kind in spec.layers.kinds)
    if cells:
        return tuple(tuple(map(_in_fp32, kind)) for kind in kinds)
    return tuple(tuple(_packed(kept) for kept in kind) if packed else kind for kind in kinds)


def _in_fp32(kept: Kept) -> Kept:
    """llama.cpp keeps every recurrent state in fp32, and of a convolution's inputs not the newest."""
    if not kept.fixed:
        return kept
    elements, latex = kept.elements, kept.latex
    if kept.taps:
        elements, latex = elements - elements // kept.taps, rf"({latex} - \frac{{{latex}}}{{{kept.taps}}})"
    return replace(
        kept, elements=elements, latex=latex, bits=KV_FORMATS["fp32"], source=_RECURRENT, assumes=("kept in fp32",)
    )


def _packed(kept: Kept) -> Kept:
    """fp8_ds_mla: the latent in fp8 with an fp32 scale for each 128, the rotary key in bf16, the index key with one fp32 scale."""
    if kept.name == "latent":
        latex = rf"({kept.latex} + \frac{{{kept.latex}}}{{32}})"
        return replace(kept, elements=kept.elements + kept.elements // 32, latex=latex, source=_PACKED)
    if kept.name == "rotary_key":
        return replace(kept, bits=KV_FORMATS["bf16"], source=_PACKED)
    if kept.name == "index_key":
        return replace(kept, elements=kept.elements + 4, latex=f"({kept.latex} + 4)", source=_PACKED)
    return kept


def _kept(spec: ModelSpec, kind: Layer, tp: int, keep_window: int, keep_sinks: int) -> Iterator[Kept]:
    for mixer in kind.mixers:
        yield from _kept_of(spec, mixer, tp, keep_window, keep_sinks)
    if kind.cross:
        for kept in _heads(kind.cross, tp, 0):
            yield Kept(f"cross_{kept.name}", kept.elements, kept.latex, kept.numbers, kept.source, of_prompt=True)


def _kept_of(spec: ModelSpec, mixer: Mixer, tp: int, keep_window: int, keep_sinks: int) -> Iterator[Kept]:
    if isinstance(mixer, Recurrence):
        yield from _states(spec, mixer, tp)
    elif isinstance(mixer, LatentAttention) and mixer.causal:
        yield from _latent(mixer, tp, keep_window + keep_sinks)
    elif isinstance(mixer, CompressedAttention):
        yield from _compressed(mixer, tp)
    elif isinstance(mixer, Attention) and mixer.causal and not mixer.shares_kv:
        if 0 < spec.max_position_embeddings <= mixer.window:  # a window that no sequence can fill
            mixer = replace(mixer, window=0)
        yield from _heads(mixer, tp, keep_window + keep_sinks)
        if mixer.indexer:
            yield _index_key(mixer.indexer, tp)


def _heads(mixer: Attention, tp: int, streamed: int) -> Iterator[Kept]:
    most, letter, source = 0, "W", _GQA
    assumes: tuple[str, ...] = ()
    if mixer.window or mixer.chunk:
        most, letter, source = mixer.window or mixer.chunk, "W" if mixer.window else "c", _WINDOW
        assumes = (_WINDOW_FULL,)
    elif streamed:
        most, letter, source = streamed, "w", _STREAMING
    k = mixer.num_key_value_heads
    heads, latex = k, "<k>"
    numbers: tuple[tuple[str, Number], ...] = (("k", k),)
    if tp > 1:
        heads, latex = max(1, k // tp), r"\max(1, \frac{<k>}{<t>})"
        numbers = (*numbers, ("t", tp))
    for name, size in (("keys", mixer.head_dim), ("values", mixer.v_head_dim)):
        of_head = (*numbers, ("d", size))
        yield Kept(name, heads * size, rf"{latex} \cdot <d>", of_head, source, assumes, most, letter)


def _latent(mixer: LatentAttention, tp: int, streamed: int) -> Iterator[Kept]:
    copied = (_COPIED,) if tp > 1 else ()
    source = _STREAMING if streamed else _MLA
    sizes = (("latent", "r_{kv}", mixer.kv_lora_rank), ("rotary_key", "d_r", mixer.qk_rope_head_dim))
    for name, letter, size in sizes:
        yield Kept(name, size, f"<{letter}>", ((letter, size),), source, copied, streamed, "w")
    if mixer.indexer:
        yield _index_key(mixer.indexer, tp)


def _compressed(mixer: CompressedAttention, tp: int) -> Iterator[Kept]:
    """A window of entries that are key and value at once, and one entry for each `compress` tokens."""
    assumes = (_COPIED,) if tp > 1 else ()
    numbers = (("d", mixer.head_dim),)
    yield Kept("window", mixer.head_dim, "<d>", numbers, _V4, (_WINDOW_FULL, *assumes), mixer.window)
    if mixer.compress:
        assumes = ("the tokens of an entry not yet full are left out", *assumes)
        yield Kept("entries", mixer.head_dim, "<d>", numbers, _V4, assumes, every=mixer.compress)
        if mixer.indexer:
            yield replace(_index_key(mixer.indexer, tp), every=mixer.compress)


def _index_key(indexer: Indexer, tp: int) -> Kept:
    size = indexer.head_dim
    return Kept("index_key", size, "<d_i>", (("d_i", size),), _INDEXER, (_COPIED,) if tp > 1 else ())


def _states(spec: ModelSpec, mixer: Recurrence, tp: int) -> Iterator[Kept]:
    for state in mixer.states:
        elements, latex = state.elements.size, state.elements.latex
        numbers = state.elements.numbers
        if state.split is not Split.NONE and tp > 1:
            elements, latex = ceil_div(elements, tp), rf"\lceil \frac{{{latex}}}{{<t>}} \rceil"
            numbers = (*numbers, ("t", tp))
        dtype = state.dtype or spec.dtype
        source = (f"{spec.source}: {mixer.kind} keeps one state a sequence", spec.url)
        own = plain(DTYPES[dtype].bits)
        yield Kept(
            state.name, elements, latex, numbers, source, (f"kept in {dtype}",), fixed=True, taps=state.taps, bits=own
        )


@dataclass(frozen=True, slots=True)
class Cache:
    """What one GPU keeps for each kind of layer, in the formats and limits of a plan."""

    kinds: tuple[tuple[Kept, ...], ...]
    bits: Bits
    plan: ServingPlan

    @property
    def cells(self) -> bool:
        """Whether tokens are kept in llama.cpp's cells: rounded up to 256, with space for a batch next to each window."""
        return self.plan.engine == "llama.cpp"

    @property
    def sharers(self) -> int:
        """Sequences that share one cache (llama.cpp's unified one), each with its own states and windows."""
        return self.plan.concurrency // self.plan.streams

    def tokens(self, kept: Kept, tokens: int) -> int:
        """How many of a sequence's tokens it has room for (a fixed state: one for each sequence that shares the cache)."""
        if kept.fixed:
            return self.sharers
        if kept.of_prompt:
            return self.plan.prompt_tokens
        if self.plan.engine == "mlx":
            return min(tokens + _STEP - 1, kept.most) if kept.most else round_up(tokens // kept.every, _STEP)
        if self.cells:
            room = min(tokens, kept.most * self.sharers + self.plan.ubatch) if kept.most else tokens // kept.every
            return round_up(room, CELLS)
        return min(tokens, kept.most) if kept.most else tokens // kept.every

    def tensor_bytes(self, kept: Kept, tokens: int) -> int:
        """Bytes of one tensor for that many tokens in it, rounded up to whole bytes."""
        value = (kept.bits or self.bits).value
        return ceil_div(tokens * kept.elements * value.numerator, 8 * value.denominator)

    def sequence_bytes(self, counts: tuple[int, ...], tokens: int) -> int:
        """Bytes of one sequence of that many tokens, in so many layers of each kind."""
        return sum(
            count * self.tensor_bytes(kept, self.tokens(kept, tokens))
            for kind, count in zip(self.kinds, counts, strict=True)
            for kept in kind
        )

    def token_bytes(self, counts: tuple[int, ...]) -> int:
        """The slope: bytes of one more token once every window is full."""
        return sum(
            ceil_div(count * self.tensor_bytes(kept, 1), kept.every)
            for kind, count in zip(self.kinds, counts, strict=True)
            for kept in kind
            if not (kept.most or kept.fixed or kept.of_prompt)
        )

    def fixed_bytes(self, counts: tuple[int, ...]) -> int:
        """The constant: full windows, recurrent states, and the cache of an encoder's output."""
        return sum(
            count * self.tensor_bytes(kept, self.tokens(kept, MOST_TOKENS))
            for kind, count in zip(self.kinds, counts, strict=True)
            for kept in kind
            if kept.most or kept.fixed or kept.of_prompt
        )

    def pool_bytes(self, counts: tuple[int, ...], tokens: int, sequences: int) -> int:
        """Bytes of `tokens` in all, spread evenly over so many sequences."""
        total = 0
        for kind, count in zip(self.kinds, counts, strict=True):
            for kept in kind:
                if kept.fixed or kept.of_prompt:
                    total += count * sequences * self.tensor_bytes(kept, self.tokens(kept, 0))
                else:
                    most = self.tokens(kept, MOST_TOKENS) * sequences
                    held = min(tokens, most) if kept.most else tokens // kept.every
                    total += count * self.tensor_bytes(kept, held)
        return total

    def tokens_held(self, counts: tuple[int, ...], budget: int, sequences: int) -> int | None:
        """The most tokens that so many sequences may hold in `budget` bytes; None when no layer grows without end."""
        if not self.token_bytes(counts):
            return None
        if self.pool_bytes(counts, 0, sequences) > budget:
            return 0
        low, high = 0, budget // self.token_bytes(counts) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.pool_bytes(counts, middle, sequences) <= budget else (low, middle)
        return low

    def components(self, spec: ModelSpec, counts: tuple[int, ...]) -> tuple[Component, ...]:
        """The cache of one sequence at the plan's context: a node for each kind of layer that keeps something."""
        return tuple(
            Component(layer.kind, children=tuple(self._leaf(kept) for kept in kind), count=count)
            for layer, kind, count in zip(spec.layers.kinds, self.kinds, counts, strict=True)
            if kind and count
        )

    def _leaf(self, kept: Kept) -> Component:
        bits = kept.bits or self.bits
        numbers: dict[str, Number] = dict(kept.numbers)
        latex = kept.latex
        if kept.of_prompt:
            numbers["s_{enc}"], latex = self.plan.prompt_tokens, rf"<s_{{enc}}> \cdot {latex}"
        elif not kept.fixed:
            numbers["s"] = self.plan.context
            tokens = "<s>"
            if kept.most:
                numbers[kept.letter], tokens = kept.most, rf"\min(<s>, <{kept.letter}>)"
            elif kept.every > 1:
                numbers["m"], tokens = kept.every, r"\lfloor \frac{<s>}{<m>} \rfloor"
            if self.plan.engine == "mlx":
                tokens = (
                    rf"\min(<s> + 255, <{kept.letter}>)"
                    if kept.most
                    else rf"256 \cdot \lceil \frac{{{tokens}}}{{256}} \rceil"
                )
            if self.cells:
                if kept.most:
                    of_all = f"<{kept.letter}>" if self.sharers == 1 else rf"<B> \cdot <{kept.letter}>"
                    numbers |= {"n_u": self.plan.ubatch} | ({} if self.sharers == 1 else {"B": self.sharers})
                    tokens = rf"\min(<s>, {of_all} + <n_u>)"
                tokens = rf"256 \cdot \lceil \frac{{{tokens}}}{{256}} \rceil"
            latex = rf"{tokens} \cdot {latex}"
        elif self.sharers > 1:
            numbers["B"], latex = self.sharers, rf"<B> \cdot {latex}"
        if bits.value.denominator == 1 and bits.value % 8 == 0:
            latex = rf"{latex} \cdot {bits.value // 8}"
        else:
            latex = rf"\lceil \frac{{{latex} \cdot {bits.latex}}}{{8}} \rceil"
            numbers |= bits.numbers
        assumes = kept.assumes
        if not kept.bits and self.plan.kv_dtype in KV_ASSUMES and self.plan.engine != "mlx":
            assumes = (*assumes, KV_ASSUMES[self.plan.kv_dtype])
        value = self.tensor_bytes(kept, self.tokens(kept, self.plan.context))
        return Component(kept.name, value, formula=Formula(latex, *kept.source, assumes), numbers=numbers)


def cache_of(spec: ModelSpec, plan: ServingPlan) -> Cache:
    """The cache of a plan on one GPU."""
    sparse = any(isinstance(kind.mixer, LatentAttention) and kind.mixer.indexer for kind in spec.layers.kinds)
    packed = sparse and plan.engine == "vllm" and plan.kv_dtype == "fp8"
    kinds = kept_tensors(spec, plan.tp, plan.keep_window or 0, plan.keep_sinks or 0, packed, plan.engine == "llama.cpp")
    if plan.engine == "llama.cpp" and (plan.cache_type_k or plan.cache_type_v):
        kinds = tuple(tuple(_typed(kept, plan) for kept in kind) for kind in kinds)
    own = MLX_KV.get(plan.kv_dtype) if plan.engine == "mlx" else None
    return Cache(kinds, own or KV_FORMATS[plan.kv_dtype], plan)


_OF_KEYS = (
    "keys",
    "latent",
    "rotary_key",
    "cross_keys",
)  # llama.cpp's values of latent attention are a view of its keys


def _typed(kept: Kept, plan: ServingPlan) -> Kept:
    """A tensor in the format of keys or of values, where the plan tells them apart."""
    own = plan.cache_type_k if kept.name in _OF_KEYS else plan.cache_type_v if "values" in kept.name else None
    return replace(kept, bits=KV_FORMATS[own]) if own and not kept.fixed else kept
