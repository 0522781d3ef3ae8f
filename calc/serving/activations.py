"""The buffers of one step beside weights and cache."""

from __future__ import annotations

from calc.breakdown import Component, Formula
from calc.hardware import Gpu
from calc.model.feed_forward import MLP, FeedForward, MoE
from calc.model.mixers import Attention, LatentAttention, Mixer
from calc.model.spec import ModelSpec
from calc.serving.plan import ServingPlan
from calc.units import GiB

_SOURCE = "the buffers of one step that no engine can do without, in 16 bits; fused attention keeps no scores"
_ASSUMES = (
    "an engine's own workspace comes on top",
    "the residual stream and its normalised copy, and the widest tensor of a layer",
)

# driver's memory from which vLLM's server takes so many tokens and sequences a step (vllm/engine/arg_utils.py)
_VLLM_DEFAULTS = ((160 * GiB, 16_384, 1024), (70 * GiB, 8192, 1024), (0, 2048, 256))


def step_limits(plan: ServingPlan, gpu: Gpu | None) -> tuple[int, int]:
    """(tokens, sequences) of one step at most: as given, or vLLM's server defaults for the GPU (an A100 counts as small)."""
    memory = gpu.memory_bytes or 0 if gpu else 0
    if gpu and gpu.name.startswith("a100"):
        memory = 0
    tokens, sequences = next((t, s) for least, t, s in _VLLM_DEFAULTS if memory >= least)
    return plan.max_batched_tokens or tokens, plan.max_seqs or sequences


def activations(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, last: bool) -> tuple[Component, ...]:
    """Hidden states and the widest tensor of a step's tokens, and on the last stage the logits of its sequences in fp32."""
    most_tokens, most_sequences = step_limits(plan, gpu)
    if plan.engine == "vllm":
        return (_vllm_peak(spec, most_sequences),)
    if plan.engine == "llama.cpp":
        return (_llama_cpp_buffer(spec, plan),)
    sequences = min(plan.concurrency, most_sequences)
    tokens = min(most_tokens, plan.concurrency * plan.prompt_tokens)
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


def _vllm_peak(spec: ModelSpec, sequences: int) -> Component:
    """The peak of vLLM's profiling run, which its sampler decides; a fit, not a law."""
    formula = Formula(
        r"15 \cdot <B> \cdot <V>",
        "fitted to logs of vLLM 0.19: 15 bytes a sequence and word (39 in 2025)",
        "",
        ("an approximation: logits, their fp32 copy, and what sampling makes of them",),
    )
    return Component(
        "sampler_peak",
        15 * sequences * spec.vocab_size,
        formula=formula,
        numbers={"B": sequences, "V": spec.vocab_size},
    )


def _llama_cpp_buffer(spec: ModelSpec, plan: ServingPlan) -> Component:
    """llama.cpp's compute buffer, which the logits of a micro-batch decide; an approximation."""
    formula = Formula(
        r"<n_u> \cdot <V> \cdot 4",
        "llama.cpp: fp32 logits of a micro-batch, the widest tensor of its graph",
        "https://github.com/ggml-org/llama.cpp",
        ("an approximation: attention without flash adds its scores",),
    )
    numbers = {"n_u": plan.ubatch, "V": spec.vocab_size}
    return Component("compute_buffer", 4 * plan.ubatch * spec.vocab_size, formula=formula, numbers=numbers)


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
