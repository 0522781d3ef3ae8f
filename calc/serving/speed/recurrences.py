"""The scan of a recurrent layer in a step: from tables of the gated delta rule, or from its bytes and FLOPs."""

from __future__ import annotations

from calc.kernel_times import KernelTimes
from calc.model.mixers import Recurrence
from calc.model.weights import Split
from calc.serving.speed.work import BYTES, Array, SequenceWork
from calc.units import ceil_div

# Kernels of a prefill. Gated delta rule (flash-linear-attention, ops/gated_delta_rule/chunk.py, as vLLM and SGLang carry it): the
# convolution, the gates, two norms, the sums of the decay, keys times keys, the triangular solve, its two products, the states, the output.
DELTA_RULE_LAUNCHES = 10
# Mamba 2 (mamba_ssm, ops/triton/ssd_combined.py): the convolution, the sums of the decay, the chunks' states, passing them on, the
# products within a chunk, the output.
SCAN_LAUNCHES = 6


def recurrence(times: KernelTimes, mixer: Recurrence, tp: int, query: int) -> SequenceWork:
    """The scan with its short convolution: from tables of the gated delta rule, for other recurrences from bytes and FLOPs.

    There the states of a sequence are read and written once a decode step; prefill passes its inputs, and does its FLOPs in chunks.
    A step that checks a draft reads a state once and writes it after each of its `query` tokens, as any of them may be the last that is
    accepted (SGLang, srt/layers/attention/fla: intermediate_states_buffer; vLLM keeps one state a token as well).
    """
    passes_of_state = (1 + query) / 2
    path = f"{mixer.kind}/scan"
    outputs = {weight.name: weight.shape[0].size for weight in mixer.weights if weight.matmul}
    states = {state.name: state.elements.size for state in mixer.states}
    if "delta_state" in states and {"beta", "gate", "query_key_value"} <= outputs.keys():
        value_heads, values = outputs["beta"], outputs["gate"]
        key_dim = states["delta_state"] // values
        shape = {
            "k_heads": ceil_div((outputs["query_key_value"] - values) // 2 // key_dim, tp),
            "v_heads": ceil_div(value_heads, tp),
            "head_k_dim": key_dim,
            "head_v_dim": values // value_heads,
        }
        return SequenceWork(
            path,
            1,
            lambda batch, context: (
                passes_of_state * times.linear_attention(batch=batch, query=1, **shape) + 0 * context
            ),
            lambda batch, new, context: times.linear_attention(batch=batch, query=new, **shape) + 0 * context,
            DELTA_RULE_LAUNCHES,
        )
    size = sum(state.elements.size * (4 if state.dtype == "fp32" else 2) for state in mixer.states) / tp
    width = sum(weight.shape[0].size for weight in mixer.weights if weight.matmul and weight.split is Split.OUTPUT) / tp
    flops = mixer.flops.size / tp

    def decode(batch: Array, context: Array) -> Array:
        return 2 * passes_of_state * times.memory_bound(batch * size / 2 + 0 * context, batch * size / 2)

    def prefill(batch: Array, new: Array, context: Array) -> Array:
        passes = 4 * times.memory_bound(batch * new * width * BYTES + 0 * context, batch * new * width * BYTES)
        return passes + times.gemm(batch * new, max(1, int(flops // 256)), 128, dtype="bf16")

    return SequenceWork(path, 1, decode, prefill, SCAN_LAUNCHES)
