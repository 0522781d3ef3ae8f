"""What mixes tokens: attention with any number of KV heads, latent attention (MLA), and recurrences with a fixed state."""

from __future__ import annotations

from dataclasses import dataclass

from calc.model.weights import Dim, Norm, Part, Split, State, Weight, dim, linear


@dataclass(frozen=True, slots=True)
class Indexer:
    """DeepSeek's sparse-attention indexer: its own small heads choose the `topk` keys that a query attends to."""

    heads: int
    head_dim: int
    topk: int
    weights: tuple[Weight, ...]


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention: MHA, GQA and MQA, whole or over a window.

    `bias` holds the letters of the projections that have one ("qkvo"). `modules` are the Hugging Face names of the four
    projections; the first three are equal where one tensor holds all. `window` and `chunk` are tokens, 0 for none.
    `rotary_dim` is the part of a head that is turned (0: all); `rotary_joined`: the program copies the head together again.
    `gated`: the query projection also makes an output gate of the same width. `shares_kv`: keys and values are an earlier layer's.
    `inputs` is the width that query, key and value read where it is not the hidden size. `passes`: the scores are computed so often.
    `routed`: query and output projections are experts, which the layer holds (JetMoE).
    """

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    v_head_dim: int
    bias: str = ""
    modules: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    window: int = 0
    chunk: int = 0
    causal: bool = True
    rotary: bool = True
    sinks: bool = False
    gated: bool = False
    shares_kv: bool = False
    key_is_value: bool = False
    softcap: bool = False
    extra: tuple[Weight, ...] = ()
    indexer: Indexer | None = None
    rotary_dim: int = 0
    rotary_joined: bool = False
    inputs: int = 0
    passes: int = 1
    routed: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        h, a, k = dim("h", self.hidden_size), dim("a", self.num_attention_heads), dim("k", self.num_key_value_heads)
        d = dim("d", self.head_dim)
        v = d if self.v_head_dim == self.head_dim else dim("d_v", self.v_head_dim)
        query, key, value, output = self.modules
        x = dim("h_in", self.inputs) if self.inputs else h
        queries = dim("2", 2) * a * d if self.gated else a * d
        weights = [] if self.routed else [*linear("query", query, queries, x, Split.OUTPUT, "q" in self.bias)]
        if not self.shares_kv:
            weights += linear("key", key, k * d, x, Split.KV, "k" in self.bias)
            if not self.key_is_value:
                weights += linear("value", value, k * v, x, Split.KV, "v" in self.bias)
        if not self.routed:
            weights += linear("output", output, h, a * v, Split.INPUT, "o" in self.bias)
        norms = (self.q_norm,) if self.shares_kv else (self.q_norm, self.k_norm, self.v_norm)
        for norm in norms:
            weights += norm.weights if norm else ()
        if self.sinks:
            weights.append(Weight("sinks", (a,), Split.OUTPUT))
        parts = [Part("attention", (*weights, *self.extra))]
        if self.indexer:
            parts.append(Part("indexer", self.indexer.weights))
        return tuple(parts)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): the cache holds one latent and one rotary key.

    `gated`: one projection of two query latents makes the queries and an output gate as wide as the values (A.X K2).
    """

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int  # 0: one full query projection
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    bias: bool = False
    norm_style: str = "llama"
    causal: bool = True
    indexer: Indexer | None = None
    extra: tuple[Weight, ...] = ()
    gated: bool = False

    @property
    def head_dim(self) -> int:
        """Width of a query and key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_key_value_heads(self) -> int:
        """Once expanded, every query head has its own keys and values."""
        return self.num_attention_heads

    @property
    def norms(self) -> tuple[Norm, ...]:
        found = [Norm("q_norm", dim("r_q", self.q_lora_rank), style=self.norm_style)] if self.q_lora_rank else []
        return (*found, Norm("kv_norm", dim("r_kv", self.kv_lora_rank), style=self.norm_style))

    @property
    def parts(self) -> tuple[Part, ...]:
        h, a = dim("h", self.hidden_size), dim("a", self.num_attention_heads)
        nope, rope = dim("d_n", self.qk_nope_head_dim), dim("d_r", self.qk_rope_head_dim)
        latent, v = dim("r_kv", self.kv_lora_rank), dim("d_v", self.v_head_dim)
        if self.q_lora_rank:
            rank = dim("r_q", self.q_lora_rank)
            weights = [*linear("query_down", "q_a_proj", rank, h, Split.NONE, self.bias)]
            if self.gated:
                both = a * (nope + rope + v)
                weights += linear("query_gate_up", "q_gate_proj", both, dim("2", 2) * rank, Split.OUTPUT)
            else:
                weights += linear("query_up", "q_b_proj", a * (nope + rope), rank, Split.OUTPUT)
        else:
            weights = [*linear("query", "q_proj", a * (nope + rope), h, Split.OUTPUT)]
        weights += linear("key_value_down", "kv_a_proj_with_mqa", latent + rope, h, Split.NONE, self.bias)
        weights += linear("key_value_up", "kv_b_proj", a * (nope + v), latent, Split.OUTPUT)
        weights += linear("output", "o_proj", h, a * v, Split.INPUT, self.bias)
        for norm in self.norms:
            weights += norm.weights
        parts = [Part("attention", (*weights, *self.extra))]
        if self.indexer:
            parts.append(Part("indexer", self.indexer.weights))
        return tuple(parts)


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """DeepSeek-V4's attention: one head serves as key and value for all queries, over a window and over compressed entries.

    Every `compress` tokens leave one entry of `head_dim` outside the window (0: the window alone). With an `indexer` a query
    attends to its `topk` best entries, without one to all. Queries come from a latent of `q_lora_rank`; the output goes through
    `o_groups` groups of `o_lora_rank`. `compressor` holds the weights that make the entries.
    """

    hidden_size: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    compress: int = 0
    compressor: tuple[Weight, ...] = ()
    indexer: Indexer | None = None
    norm_style: str = "wide"
    causal: bool = True
    num_key_value_heads: int = 1

    @property
    def parts(self) -> tuple[Part, ...]:
        h, a, d = dim("h", self.hidden_size), dim("a", self.num_attention_heads), dim("d", self.head_dim)
        rank, groups, out = dim("r_q", self.q_lora_rank), dim("g", self.o_groups), dim("r_o", self.o_lora_rank)
        numbers = a.numbers + d.numbers + groups.numbers
        in_group = Dim(a.size * d.size // groups.size, r"\frac{<a> \cdot <d>}{<g>}", numbers)
        weights = (
            *linear("query_down", "q_a_proj", rank, h),
            *linear("query_up", "q_b_proj", a * d, rank, Split.OUTPUT),
            *linear("key_value", "kv_proj", d, h),
            *linear("output_down", "o_a_proj", groups * out, in_group),
            *linear("output_up", "o_b_proj", h, groups * out),
            Weight("sinks", (a,), Split.OUTPUT),
            *Norm("query_norm", rank, style=self.norm_style).weights,
            *Norm("key_value_norm", d, style=self.norm_style).weights,
        )
        parts = [Part("attention", weights)]
        if self.compressor:
            parts.append(Part("compressor", self.compressor))
        if self.indexer:
            parts.append(Part("indexer", self.indexer.weights))
        return tuple(parts)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A mixer with a state of fixed size: Mamba, gated delta net, RWKV, linear attention, a short convolution.

    `states` is what one sequence keeps; `flops` is the forward FLOPs of one token beyond its weight matmuls (the scan and the
    convolution), as a formula; `saved` is the elements that the usual kernel keeps for backward, for each token.
    """

    kind: str  # the component's name: "mamba", "delta_net", ...
    weights: tuple[Weight, ...]
    states: tuple[State, ...]
    flops: Dim
    saved: Dim

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(self.kind, self.weights),)


Mixer = Attention | LatentAttention | CompressedAttention | Recurrence
