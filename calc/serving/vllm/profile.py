"""The highest point of vLLM's profiling run: "PyTorch activation peak memory".

The run passes as many pictures as a step holds through the encoder, computes one step of as many tokens as a step may have, then
samples one token for each of as many sequences. The tensors that live at once follow from the program; the constants of a version are
in `calc.serving.vllm.versions`.
"""

from __future__ import annotations

from calc.breakdown import Component, Formula
from calc.hardware import Gpu
from calc.model.feed_forward import MLP, MoE
from calc.model.mixers import Attention, LatentAttention
from calc.model.spec import Layer, ModelSpec
from calc.serving.plan import ServingPlan
from calc.serving.vllm.encoder import encoder
from calc.serving.vllm.step import step_limits
from calc.serving.vllm.versions import (
    KEEPS_EXPERT_WORKSPACE,
    SAMPLER_BYTES,
    SAMPLER_ROWS,
    version,
)
from calc.units import GiB, KiB, MiB, ceil_div

_MODELS = "vllm/model_executor/models: the tensors that live at once in a layer"
_RUNNER = "vllm/v1/worker/gpu_model_runner.py, profile_run and _dummy_sampler_run"
_MLA = "vllm/v1/attention/backends/mla/common.py: the largest context that chunked prefill expands, allocated in the profile"
_CUBLAS = ("PyTorch, aten/src/ATen/cuda/CUDABlas.cpp, getChosenWorkspaceSize", "https://github.com/pytorch/pytorch")
_URL = "https://github.com/vllm-project/vllm"
_MULTIPROCESSORS = {"8.0": 108, "9.0": 132, "10.0": 148}  # NVIDIA's architecture papers: A100, H100 SXM, B200
_SMALLER = 84  # GA102, as in the RTX A6000
_MLA_ROWS = 64 * 1024


def profile(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, *, first: bool, last: bool) -> tuple[Component, ...]:
    """The parts that add up to "PyTorch activation peak memory" on a stage: those of the encoder, the step or the sampler,
    whichever is highest."""
    if plan.activation_gib is not None:
        value = int(plan.activation_gib * GiB)
        return (Component("given", value, formula=Formula("<o>", "given by the plan"), numbers={"o": value}),)
    number = version(plan.engine_version)
    always = [_workspace(gpu)]
    kept = _expert_workspace(spec, plan, gpu) if KEEPS_EXPERT_WORKSPACE.at(number).value else ()
    step = _step(spec, plan, gpu, first=first, last=last)
    if not KEEPS_EXPERT_WORKSPACE.at(number).value:
        step = (*step, *_expert_workspace(spec, plan, gpu))
    sampler = _sampler(spec, plan, gpu) if last and spec.has_head else ()
    pictures, outputs = encoder(spec, plan, *step_limits(plan, gpu)) if first else ((), ())
    text = max(step, sampler, key=_sum)
    highest = max((*text, *kept, *outputs), pictures, key=_sum)
    return tuple(part for part in (*highest, *always) if part.total)


def _sum(parts: tuple[Component, ...]) -> float:
    return sum(part.total for part in parts)


def _workspace(gpu: Gpu | None) -> Component:
    """cuBLAS's workspace, which torch allocates at the first matmul."""
    hopper = bool(gpu and gpu.compute_capability and int(gpu.compute_capability.split(".")[0]) >= 9)
    size = 32 * MiB if hopper else 8 * MiB + 128 * KiB
    formula = Formula("<w>", *_CUBLAS, ("32 MiB from Hopper on, 8.125 MiB before",))
    return Component("cublas_workspace", size, formula=formula, numbers={"w": size})


def _step(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, *, first: bool, last: bool) -> tuple[Component, ...]:
    """The widest layer of a step: three tensors of the hidden size, and the layer's own."""
    tokens = step_limits(plan, gpu)[0]
    numbers = {"T": tokens, "h": spec.hidden_size}
    assumes = ("what the layer reads, the residual, and the copy that its caller still holds",)
    hidden = Formula(r"3 \cdot <T> \cdot <h> \cdot 2", _MODELS, _URL, assumes)
    parts = [Component("hidden_states", 6 * tokens * spec.hidden_size, formula=hidden, numbers=numbers)]
    passed = int(not first) + int(not last)
    if passed:
        between = Formula(r"<n> \cdot 2 \cdot <T> \cdot <h> \cdot 2", _RUNNER, _URL, ("hidden states and residual",))
        both = {"n": passed, **numbers}
        parts.append(Component("between_stages", 4 * passed * tokens * spec.hidden_size, formula=between, numbers=both))
    widths = [found for kind in spec.layers.kinds for found in (_feed_forward(kind, plan), _mixer(kind, plan))]
    name, width = max(widths, key=lambda found: found[1], default=("layer", 0))
    inner = Formula(
        r"<T> \cdot <w> \cdot 2", _MODELS, _URL, ("w: features of the tensors that live at once in 16 bits",)
    )
    parts.append(Component(name, 2 * tokens * width, formula=inner, numbers={"T": tokens, "w": width}))
    return (*parts, *_context(spec, plan, gpu))


def _feed_forward(kind: Layer, plan: ServingPlan) -> tuple[str, int]:
    """Features of gate, up and their product, of the dense layer or of the shared expert next to the router's logits."""
    layer = kind.feed_forward
    if isinstance(layer, MLP):
        return "feed_forward", _mlp(layer, plan.tp)
    if isinstance(layer, MoE):
        shared = _mlp(layer.shared, plan.tp) if layer.shared else 0
        return "experts", shared + 2 * layer.num_experts + layer.hidden_size
    return "feed_forward", 0


def _mlp(mlp: MLP, tp: int) -> int:
    return (3 if mlp.gated else 2) * ceil_div(mlp.intermediate_size, tp)


def _mixer(kind: Layer, plan: ServingPlan) -> tuple[str, int]:
    """Features of queries, keys and values, of the turned copies of the first two, and of the output."""
    mixer = kind.mixer
    if isinstance(mixer, LatentAttention):
        heads = ceil_div(mixer.num_attention_heads, plan.tp)
        return "attention", heads * (2 * mixer.head_dim + mixer.v_head_dim) + mixer.q_lora_rank + 2 * mixer.kv_lora_rank
    if isinstance(mixer, Attention):
        heads = ceil_div(mixer.num_attention_heads, plan.tp)
        kv = max(1, mixer.num_key_value_heads // plan.tp)
        return "attention", 2 * heads * mixer.head_dim + heads * mixer.v_head_dim + kv * (
            2 * mixer.head_dim + mixer.v_head_dim
        )
    return "mixer", 0


def _context(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None) -> tuple[Component, ...]:
    """Latent attention's expanded keys and values of a chunk of context."""
    mixers = [kind.mixer for kind in spec.layers.kinds if isinstance(kind.mixer, LatentAttention)]
    if not mixers or version(plan.engine_version) < (0, 8):
        return ()
    sequences = step_limits(plan, gpu)[1]
    rows = max(min(max(8 * plan.context, 4 * sequences * plan.block_size), _MLA_ROWS), sequences * plan.block_size)
    heads = ceil_div(mixers[0].num_attention_heads, plan.tp)
    width = mixers[0].qk_nope_head_dim + mixers[0].v_head_dim
    formula = Formula(r"<r> \cdot <a_t> \cdot <d> \cdot 2", _MLA, _URL, ("a_t: heads of one rank",))
    numbers = {"r": rows, "a_t": heads, "d": width}
    return (Component("expanded_context", 2 * rows * heads * width, formula=formula, numbers=numbers),)


def _expert_workspace(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None) -> tuple[Component, ...]:
    """The two workspaces of the fused experts; none for MXFP4, whose kernels have their own."""
    found = [kind.feed_forward for kind in spec.layers.kinds if isinstance(kind.feed_forward, MoE)]
    if not found or plan.weights == "mxfp4":
        return ()
    moe = found[0]
    tokens = step_limits(plan, gpu)[0] * plan.dp
    wide = ceil_div(moe.expert.intermediate_size, 1 if plan.ep > 1 else plan.tp)
    gates = (2 if moe.expert.gated else 1) * wide
    kept = bool(KEEPS_EXPERT_WORKSPACE.at(version(plan.engine_version)).value)
    second = max(wide, spec.hidden_size) if kept else wide
    width = max(gates, spec.hidden_size) + second
    formula = Formula(
        r"<T> \cdot <K> \cdot <w> \cdot 2",
        "vllm/model_executor/layers/fused_moe: max(gate and up, h) and "
        + ("max(f, h)" if kept else "f")
        + " for each chosen expert",
        _URL,
        ("with data-parallel attention a rank's experts may get the tokens of all ranks",) if plan.dp > 1 else (),
    )
    numbers = {"T": tokens, "K": moe.num_experts_per_tok, "w": width}
    value = 2 * tokens * moe.num_experts_per_tok * width
    return (Component("expert_workspace", value, formula=formula, numbers=numbers),)


def _sampler(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None) -> tuple[Component, ...]:
    """Logits and what sampling makes of them, next to the step's hidden states and the chosen rows of them."""
    number = version(plan.engine_version)
    tokens, sequences = step_limits(plan, gpu)
    words, hidden = spec.vocab_size, spec.hidden_size
    each = int(SAMPLER_BYTES.at(number).value)
    logits = Formula(
        rf"{each} \cdot <B> \cdot <V>", SAMPLER_BYTES.at(number).source, _URL, ("as many sequences as a step takes",)
    )
    parts = [Component("sampler", each * sequences * words, formula=logits, numbers={"B": sequences, "V": words})]
    if SAMPLER_ROWS.at(number).value:
        programs = min(_MULTIPROCESSORS.get(gpu.compute_capability or "", _SMALLER) if gpu else _SMALLER, sequences)
        rows = Formula(r"<P> \cdot <V> \cdot 4", SAMPLER_ROWS.at(number).source, _URL)
        parts.append(Component("sampler_rows", 4 * programs * words, formula=rows, numbers={"P": programs, "V": words}))
    states = Formula(r"<T> \cdot <h> \cdot 2 + 2 \cdot <B> \cdot <h> \cdot 2", _RUNNER, _URL)
    value = 2 * tokens * hidden + 4 * sequences * hidden
    numbers = {"T": tokens, "h": hidden, "B": sequences}
    return (*parts, Component("hidden_states", value, formula=states, numbers=numbers))
