"""llama.cpp's compute buffer: the highest point of its graph for one micro-batch, in fp32.

The closed forms below are those that `llama-fit-params` prints for header-only files of dense models; its allocator's holes and the
experts' tensors make others differ by a few per cent, and so does part of a model on several GPUs.
"""

from __future__ import annotations

from calc.breakdown import Component, Formula, Number
from calc.hardware import Gpu
from calc.model.feed_forward import MLP, MoE
from calc.model.mixers import Attention, LatentAttention
from calc.model.spec import Layer, ModelSpec
from calc.serving.cache import CELLS
from calc.serving.plan import ServingPlan
from calc.units import round_up

_SOURCE = "llama.cpp, src/llama-graph.cpp and ggml/src/ggml-alloc.c, as llama-fit-params prints it"
_URL = "https://github.com/ggml-org/llama.cpp"


def buffers(
    spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, layers: range
) -> tuple[tuple[Component, ...], tuple[Component, ...]]:
    """The compute buffer of a device, and nothing reserved."""
    if plan.activation_gib is not None:
        value = int(plan.activation_gib * 2**30)
        return (Component("given", value, formula=Formula("<o>", "given by the plan"), numbers={"o": value}),), ()
    return (compute_buffer(spec, plan, layers),), ()


_COPIES = 4  # GGML_SCHED_MAX_COPIES: inputs of a device where several GPUs hold all layers and work one after another


def compute_buffer(spec: ModelSpec, plan: ServingPlan, layers: range) -> Component:
    """Logits of a micro-batch, a layer's feed-forward, or its attention, whichever is most on a device with these layers; the logits
    are on the last. With all layers on several GPUs each device has four copies of what it gets from another."""
    tokens = min(plan.ubatch, round_up(plan.context, CELLS))
    last = layers.stop == spec.num_hidden_layers
    piped = plan.pp > 1 and plan.gpu_layers in (None, "auto") and not plan.n_cpu_moe
    found = [_logits(spec)] if spec.has_head and last else []
    for kind in spec.layers.kinds if layers else ():
        found += [_feed_forward(spec, kind, plan, on_host=(plan.n_cpu_moe or 0) >= layers.stop)]
        found += [_attention(spec, kind, plan)]
    if piped:
        found = [_piped(spec, plan, terms, first=layers.start == 0, last=last) for terms in found]
    latex, numbers = max(found, key=lambda terms: _value(terms[1]), default=_terms())
    formula = Formula(
        rf"<n_u> \cdot ({latex}) \cdot 4", _SOURCE, _URL, ("tokens of a micro-batch, at most the context's",)
    )
    value = 4 * tokens * _value(numbers)
    return Component("compute_buffer", value, formula=formula, numbers={"n_u": tokens} | dict(numbers))


def _piped(spec: ModelSpec, plan: ServingPlan, terms: _Terms, *, first: bool, last: bool) -> _Terms:
    """The features with their mask and inputs replaced by copies: of the embeddings on the first device, of the hidden states and the
    residual on the others, and of the mask and the tokens' positions."""
    own = {name[3:-1]: int(value) for name, value in terms[1] if name not in ("w_{mask}", "w_{inputs}")}
    passed = spec.hidden_size * (1 if first else 2) + _mask(spec, plan) + _inputs(plan) - int(not last)
    return _terms(**own, copies=_COPIES * passed)


_Terms = tuple[str, tuple[tuple[str, Number], ...]]


def _value(numbers: tuple[tuple[str, Number], ...]) -> int:
    return int(sum(value for _, value in numbers))


def _terms(**features: int) -> _Terms:
    """A sum of features for each token: `w_h` is shown as w with the index h."""
    pairs = tuple((f"w_{{{name}}}", value) for name, value in features.items() if value)
    return " + ".join(f"<{name}>" for name, _ in pairs) or "0", pairs


def _logits(spec: ModelSpec) -> _Terms:
    return _terms(logits=spec.vocab_size, hidden=spec.hidden_size)


def _cells(spec: ModelSpec, plan: ServingPlan) -> int:
    return round_up(plan.context, CELLS) if spec.generates else plan.context


def _mask(spec: ModelSpec, plan: ServingPlan) -> int:
    """Features of the mask: a cell is 16 bits with flash attention, 32 without."""
    return _cells(spec, plan) // (2 if plan.flash_attention else 1)


def _inputs(plan: ServingPlan) -> int:
    """Features of a token's position, output row and rows in the cache: 24 bytes with flash attention, 16 without."""
    return 6 if plan.flash_attention else 4


def _heads(kind: Layer) -> int:
    mixer = kind.mixer
    if isinstance(mixer, Attention | LatentAttention):
        return mixer.num_attention_heads * mixer.head_dim
    return 0


def _feed_forward(spec: ModelSpec, kind: Layer, plan: ServingPlan, *, on_host: bool) -> _Terms:
    """Gate, up and their product next to the layer's input, its norm and what attention gave; of experts `on_host` their outputs."""
    layer, hidden = kind.feed_forward, spec.hidden_size
    if isinstance(layer, MLP):
        inner = (3 if layer.gated else 2) * layer.intermediate_size
        mask = _mask(spec, plan) * (1 if plan.flash_attention else 3)  # the holes that the scores of attention left
        width = 2 * hidden + (_heads(kind) or hidden)
        return _terms(hidden=width, inner=inner, mask=mask, inputs=_inputs(plan))
    if isinstance(layer, MoE):
        if on_host:
            given = 2 * hidden + _heads(kind)
            chosen = layer.num_experts_per_tok * hidden
            return _terms(hidden=given, inner=chosen, mask=_mask(spec, plan), inputs=_inputs(plan))
        inner = layer.num_experts_per_tok * (2 * hidden + layer.expert.intermediate_size)
        return _terms(hidden=2 * hidden, inner=inner, mask=_mask(spec, plan), inputs=_inputs(plan))
    return _terms(hidden=2 * hidden)


def _attention(spec: ModelSpec, kind: Layer, plan: ServingPlan) -> _Terms:
    """Queries and outputs, and without flash attention the scores of all heads over all cells."""
    mixer, hidden = kind.mixer, spec.hidden_size
    if isinstance(mixer, LatentAttention):  # absorbed: a head's query and output are as wide as the latent
        wide = mixer.num_attention_heads * (2 * mixer.kv_lora_rank + mixer.qk_rope_head_dim)
    elif isinstance(mixer, Attention):
        wide = 2 * _heads(kind)
    else:
        return _terms(hidden=2 * hidden)
    kept = 0
    if isinstance(mixer, Attention) and spec.generates and not plan.flash_attention:
        kept = mixer.num_key_value_heads * (mixer.head_dim + mixer.v_head_dim)
    cells = _cells(spec, plan)
    if isinstance(mixer, Attention) and mixer.window:
        cells = min(cells, round_up(mixer.window + plan.ubatch, CELLS))
    scores = 0 if plan.flash_attention else mixer.num_attention_heads * cells
    inputs = _inputs(plan) if spec.generates else 0
    return _terms(hidden=2 * hidden, heads=wide, kv=kept, scores=scores, mask=_mask(spec, plan), inputs=inputs)
