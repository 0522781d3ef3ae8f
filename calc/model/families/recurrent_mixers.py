"""Mixers with a state of fixed size: Mamba 1 and 2, the gated delta rule, KDA, short convolutions.

FLOPs are those of the recurrent form, one multiply or add each, beyond the projections: what one token does to the state.
"""

from __future__ import annotations

from calc.model.mixers import Recurrence
from calc.model.weights import Dim, Norm, Split, State, Weight, dim, linear


def conv_state(channels: Dim, kernel: Dim) -> State:
    """What transformers keeps of a causal convolution: the last `kernel` inputs of each channel."""
    return State("convolution", channels * kernel, split=Split.OUTPUT, taps=kernel.size)


def _conv(channels: Dim, kernel: Dim, bias: bool) -> tuple[Weight, ...]:
    weight = Weight("convolution", (channels, kernel))
    return (weight, Weight("convolution_bias", (channels,))) if bias else (weight,)


def _times(number: int, *dims: Dim) -> Dim:
    product = dim(str(number), number)
    for each in dims:
        product = product * each
    return product


def gated_delta_net(
    h: Dim,
    key_heads: Dim,
    value_heads: Dim,
    key_dim: Dim,
    value_dim: Dim,
    kernel: Dim,
    split: bool = True,
    apart: bool = False,
) -> Recurrence:
    """Gated delta net (arXiv 2412.06464): S <- a S + b k (v - S^T k)^T, o = S^T q. 7 FLOPs an element of the state.

    `split` tells the projections' names: Qwen3.5 has four (in_proj_qkv, _z, _b, _a), Qwen3-Next two (in_proj_qkvz, _ba). `apart`:
    OLMo Hybrid has one for each part.
    """
    keys, values = key_heads * key_dim, value_heads * value_dim
    mixed = keys + keys + values
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    qkv, z, b, a = names if split else ("in_proj_qkvz", "in_proj_qkvz", "in_proj_ba", "in_proj_ba")
    state = value_heads * key_dim * value_dim
    inputs = linear("query_key_value", qkv, mixed, h, Split.OUTPUT)
    output = "out_proj"
    if apart:
        z, b, a, output = "g_proj", "b_proj", "a_proj", "o_proj"
        sizes = (("query", "q_proj", keys), ("key", "k_proj", keys), ("value", "v_proj", values))
        inputs = tuple(weight for part in sizes for weight in linear(*part, h, Split.OUTPUT))
    weights = (
        *inputs,
        *linear("gate", z, values, h, Split.OUTPUT),
        *linear("beta", b, value_heads, h, Split.OUTPUT),
        *linear("decay", a, value_heads, h, Split.OUTPUT),
        *_conv(mixed, kernel, bias=False),
        Weight("decay_bias", (value_heads,)),
        Weight("decay_rate", (value_heads,), wide=split and not apart),
        *Norm("norm", value_dim).weights,
        *linear("output", output, h, values, Split.INPUT),
    )
    states = (conv_state(mixed, kernel), State("delta_state", state, "fp32", Split.OUTPUT))
    flops = _times(7, state) + _times(2, kernel, mixed)
    return Recurrence("delta_net", weights, states, flops, mixed + mixed + values + value_heads + value_heads)


def mamba2(
    h: Dim,
    heads: Dim,
    head_dim: Dim,
    groups: Dim,
    state: Dim,
    kernel: Dim,
    *,
    bias: bool,
    conv_bias: bool,
    norm: bool = True,
    output_bias: bool | None = None,
) -> Recurrence:
    """Mamba 2 (arXiv 2405.21060): S <- a S + dt x B^T, y = S C + D x. 5 FLOPs an element of the state.

    `output_bias` is that of the last projection where it is not `bias`, that of the first.
    """
    inner = heads * head_dim
    mixed = inner + _times(2, groups, state)
    memory = inner * state
    weights = (
        *linear("input", "in_proj", inner + mixed + heads, h, Split.OUTPUT, bias),
        *_conv(mixed, kernel, conv_bias),
        Weight("step_bias", (heads,)),
        Weight("decay_rate", (heads,)),
        Weight("skip", (heads,)),
        *(Norm("norm", inner).weights if norm else ()),
        *linear("output", "out_proj", h, inner, Split.INPUT, bias if output_bias is None else output_bias),
    )
    states = (conv_state(mixed, kernel), State("ssm_state", memory, "fp32", Split.OUTPUT))
    flops = _times(5, memory) + _times(2, kernel, mixed) + _times(2, inner)
    return Recurrence("mamba", weights, states, flops, mixed + mixed + inner + heads)


def mamba1(
    h: Dim,
    inner: Dim,
    state: Dim,
    rank: Dim,
    kernel: Dim,
    *,
    bias: bool,
    conv_bias: bool,
    norms: bool = False,
    stacked: bool = False,
) -> Recurrence:
    """Mamba (arXiv 2312.00752): the state of each channel decays by itself. 9 FLOPs an element of the state.

    `norms`: Jamba's norms over the step and the two state projections. `stacked`: those projections are no linear layers, but
    one tensor for all heads (Zamba).
    """
    projections, step = ("", "") if stacked else ("x_proj", "dt_proj")
    extra = tuple(
        weight
        for name, size in (("step_norm", rank), ("input_norm", state), ("output_norm", state))
        for weight in Norm(name, size).weights
    )
    weights = (
        *linear("input", "in_proj", _times(2, inner), h, Split.OUTPUT, bias),
        *_conv(inner, kernel, conv_bias),
        *linear("state_projections", projections, rank + _times(2, state), inner, Split.INPUT),
        *linear("step", step, inner, rank, Split.OUTPUT, bias=True),
        Weight("decay_rate", (inner, state), Split.OUTPUT),
        Weight("skip", (inner,), Split.OUTPUT),
        *(extra if norms else ()),
        *linear("output", "out_proj", h, inner, Split.INPUT, bias),
    )
    states = (conv_state(inner, kernel), State("ssm_state", inner * state, "fp32", Split.OUTPUT))
    flops = _times(9, inner, state) + _times(2, kernel, inner) + _times(2, inner)
    return Recurrence("mamba", weights, states, flops, _times(4, inner) + rank + _times(2, state))


def short_convolution(h: Dim, kernel: Dim, *, bias: bool) -> Recurrence:
    """LFM2's gated convolution: c * conv(b * x), of which b, c and x are projections. Two gates and the taps are its FLOPs."""
    weights = (
        *linear("input", "in_proj", _times(3, h), h, Split.OUTPUT, bias),
        *_conv(h, kernel, bias),
        *linear("output", "out_proj", h, h, Split.INPUT, bias),
    )
    return Recurrence(
        "convolution", weights, (conv_state(h, kernel),), _times(2, kernel, h) + _times(2, h), _times(5, h)
    )


def rg_lru(h: Dim, width: Dim, blocks: Dim, kernel: Dim) -> Recurrence:
    """Griffin's recurrent block (arXiv 2402.19427, section 2.4): h <- a h + sqrt(1 - a^2) (i x), with gates by block of channels."""
    block = Dim(width.size // blocks.size, r"\frac{<r>}{<a>}", width.numbers + blocks.numbers)
    gates = tuple(
        weight
        for name in ("input_gate", "recurrent_gate")
        for weight in (Weight(name, (blocks, block, block)), Weight(f"{name}_bias", (blocks, block)))
    )
    weights = (
        *linear("gate", "linear_y", width, h, Split.OUTPUT, bias=True),
        *linear("input", "linear_x", width, h, Split.OUTPUT, bias=True),
        *_conv(width, kernel, bias=True),
        *gates,
        Weight("decay_rate", (width,)),
        *linear("output", "linear_out", h, width, Split.INPUT, bias=True),
    )
    before = Dim(kernel.size - 1, "(<K> - 1)", kernel.numbers)  # it keeps the inputs before the newest
    states = (
        State("convolution", width * before, split=Split.OUTPUT),
        State("lru_state", width, "fp32", Split.OUTPUT),
    )
    flops = _times(8, width) + _times(2, kernel, width)
    return Recurrence("recurrence", weights, states, flops, _times(6, width))


def kimi_delta(h: Dim, heads: Dim, head_dim: Dim, kernel: Dim, narrow: bool = True) -> Recurrence:
    """Kimi delta attention (arXiv 2510.26692): the gated delta rule with one decay a channel. 7 FLOPs an element of the state.

    `narrow`: decay and output gate come through a width of `head_dim`, as Kimi's own; else from whole projections.
    """
    inner = heads * head_dim
    mixed = _times(3, inner)
    state = heads * head_dim * head_dim
    weights = (
        *linear("query", "q_proj", inner, h, Split.OUTPUT),
        *linear("key", "k_proj", inner, h, Split.OUTPUT),
        *linear("value", "v_proj", inner, h, Split.OUTPUT),
        *_conv(mixed, kernel, bias=False),
        *_narrow("decay", "f", inner, h, head_dim, narrow),
        Weight("decay_bias", (inner,)),
        Weight("decay_rate", (heads,)),
        *linear("beta", "b_proj", heads, h, Split.OUTPUT),
        *_narrow("gate", "g", inner, h, head_dim, narrow),
        *Norm("norm", head_dim).weights,
        *linear("output", "o_proj", h, inner, Split.INPUT),
    )
    states = (conv_state(mixed, kernel), State("delta_state", state, "fp32", Split.OUTPUT))
    flops = _times(7, state) + _times(2, kernel, mixed)
    return Recurrence("delta_net", weights, states, flops, mixed + mixed + inner + inner + heads)


def _narrow(name: str, letter: str, output: Dim, inputs: Dim, width: Dim, narrow: bool) -> tuple[Weight, ...]:
    """A projection in two steps through `width`, or a whole one."""
    if not narrow:
        return linear(name, f"{letter}_proj", output, inputs, Split.OUTPUT)
    down = linear(f"{name}_down", f"{letter}_a_proj", width, inputs)
    return (*down, *linear(f"{name}_up", f"{letter}_b_proj", output, width, Split.OUTPUT))


def lightning(h: Dim, heads: Dim, head_dim: Dim) -> Recurrence:
    """Lightning attention (arXiv 2401.04658): S <- r S + k v^T, o = q S. 5 FLOPs an element of the state."""
    inner = heads * head_dim
    state = heads * head_dim * head_dim
    weights = (
        *linear("query_key_value", "qkv_proj", _times(3, inner), h, Split.OUTPUT),
        *linear("gate", "output_gate", inner, h, Split.OUTPUT),
        *Norm("norm", inner).weights,
        *linear("output", "out_proj", h, inner, Split.INPUT),
    )
    states = (State("linear_state", state, split=Split.OUTPUT),)
    return Recurrence("linear_attention", weights, states, _times(5, state), _times(6, inner))


def mlstm(h: Dim, heads: Dim, key_dim: Dim, value_dim: Dim, *, bias: bool, fused: bool) -> Recurrence:
    """mLSTM (arXiv 2405.04517, section 2.3): C <- f C + i v k^T, n <- f n + i k, h = C q / max(|n q|, 1), with a running maximum m
    that keeps the gates finite. 5 FLOPs an element of C and n.

    `fused`: one linear layer makes query, key, value and output gate, another both gates.
    """
    keys, values = heads * key_dim, heads * value_dim
    query, key, value, output = ("qkv_opreact",) * 4 if fused else ("q", "k", "v", "ogate_preact")
    first, second = ("ifgate_preact",) * 2 if fused else ("igate_preact", "fgate_preact")
    memory, normaliser = keys * value_dim, keys
    weights = (
        *linear("query", query, keys, h, Split.OUTPUT, bias),
        *linear("key", key, keys, h, Split.OUTPUT, bias),
        *linear("value", value, values, h, Split.OUTPUT, bias),
        *linear("output_gate", output, values, h, Split.OUTPUT, bias),
        *linear("input_gate", first, heads, h, Split.OUTPUT, bias=True),
        *linear("forget_gate", second, heads, h, Split.OUTPUT, bias=True),
        *Norm("norm", values, bias=bias).weights,
        *linear("output", "out_proj", h, values, Split.INPUT, bias),
    )
    states = (
        State("memory", memory, "fp32", Split.OUTPUT),
        State("normaliser", normaliser, "fp32", Split.OUTPUT),
        State("maximum", heads, "fp32", Split.OUTPUT),
    )
    flops = _times(5, memory) + _times(5, normaliser)
    return Recurrence("mlstm", weights, states, flops, keys + keys + values + values + values + heads + heads)


def rwkv_mixer(h: Dim, inner: Dim) -> Recurrence:
    """RWKV 4's time mix (arXiv 2305.13048, equations 11 to 18): a weighted mean kept as numerator, denominator and maximum.

    The states also hold the token before, once for this mix and once for the MLP's.
    """
    mixes = tuple(Weight(f"mix_{name}", (h,)) for name in ("key", "value", "receptance"))
    weights = (
        Weight("decay_rate", (inner,)),
        Weight("bonus", (inner,)),
        *mixes,
        *linear("key", "key", inner, h, Split.OUTPUT),
        *linear("value", "value", inner, h, Split.OUTPUT),
        *linear("receptance", "receptance", inner, h, Split.OUTPUT),
        *linear("output", "output", h, inner, Split.INPUT),
    )
    states = (State("token_before", _times(2, h)), State("wkv_state", _times(3, inner), "fp32", Split.OUTPUT))
    return Recurrence("rwkv", weights, states, _times(11, inner) + _times(9, h), _times(3, h) + _times(4, inner))
