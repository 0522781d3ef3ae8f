"""The buffers of one step besides weights and cache."""

from __future__ import annotations

from calc.breakdown import Component, Formula
from calc.model.feed_forward import MLP, FeedForward, MoE
from calc.model.mixers import Attention, LatentAttention, Mixer
from calc.model.spec import ModelSpec
from calc.serving.plan import ServingPlan

_SOURCE = "the buffers of one step that no engine can do without, in 16 bits; fused attention keeps no scores"
_ASSUMES = (
    "an engine's own workspace comes on top",
    "the residual stream and its normalised copy, and the widest tensor of a layer",
)

_TOKENS = 8192  # of a step at most, where neither plan nor engine says
_SEQUENCES = 256


def activations(spec: ModelSpec, plan: ServingPlan, *, last: bool) -> tuple[Component, ...]:
    """Hidden states and the widest tensor of a step's tokens, and on the last stage the logits of its sequences in fp32."""
    sequences = min(plan.concurrency, plan.max_seqs or _SEQUENCES)
    tokens = min(plan.max_batched_tokens or _TOKENS, plan.concurrency * plan.prompt_tokens)
    width = max((_width(kind.mixer, kind.feed_forward, plan.tp) for kind in spec.layers.kinds), default=0)
    parts = [
        Component(
            "hidden_states",
            4 * tokens * spec.hidden_size,
            formula=Formula(r"2 \cdot <T> \cdot <h> \cdot 2", _SOURCE, "", _ASSUMES),
            numbers={"T": tokens, "h": spec.hidden_size},
        ),
        Component(
            "widest_tensor",
            2 * tokens * width,
            formula=Formula(r"<T> \cdot <w> \cdot 2", _SOURCE, "", _ASSUMES),
            numbers={"T": tokens, "w": width},
        ),
    ]
    if last and spec.has_head:
        parts.append(
            Component(
                "logits",
                4 * sequences * spec.vocab_size,
                formula=Formula(
                    r"<B> \cdot <V> \cdot 4", "logits of the last token of each sequence, in fp32 for sampling"
                ),
                numbers={"B": sequences, "V": spec.vocab_size},
            )
        )
    return tuple(parts)


def _width(mixer: Mixer | None, feed_forward: FeedForward | None, tp: int) -> int:
    """Features of a layer's widest tensor for each token, on one rank."""
    widths = [0]
    if isinstance(mixer, Attention):
        kv = max(1, mixer.num_key_value_heads // tp)
        widths.append(mixer.num_attention_heads // tp * mixer.head_dim + kv * (mixer.head_dim + mixer.v_head_dim))
    elif isinstance(mixer, LatentAttention):
        widths.append(mixer.num_attention_heads // tp * (2 * mixer.head_dim + mixer.v_head_dim))
    if isinstance(feed_forward, MLP):
        widths.append(_mlp_width(feed_forward, tp))
    elif isinstance(feed_forward, MoE):
        widths.append(feed_forward.num_experts_per_tok * _mlp_width(feed_forward.expert, tp))
    return max(widths)


def _mlp_width(mlp: MLP, tp: int) -> int:
    return (2 if mlp.gated else 1) * -(-mlp.intermediate_size // tp)
