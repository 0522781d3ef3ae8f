"""torchtitan's own programs of Llama 3, Qwen3 and DeepSeek-V3 decoders: a layer, both ends of the stack, and the loss.

torchtitan 0.2.2: nn.RMSNorm as one operator, rotary positions turned as complex numbers in fp32 (Qwen3: by cosines and sines),
PyTorch's attention kernels, a loss outside the model. Checkpoints wrap one layer each; those of
selective recomputation keep every second matmul's output from the first on, the attention kernel's, and reduce-scatters'.
"""

from __future__ import annotations

from functools import lru_cache

from calc.model.feed_forward import MLP
from calc.model.mixers import Attention
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Dim, Norm, dim
from calc.model.weights import Weight as ModelWeight
from calc.training import ops
from calc.training.blocks import OUTSIDE, Block, record
from calc.training.hf_attention import kernel
from calc.training.ops import BOOL, FULL, LONG, ONE
from calc.training.program import Builder, Settings
from calc.training.tape import FIXED, POSITIONS, TOKENS, Edge, Value

# Model classes whose architecture torchtitan has a program for; those of Qwen3 turn heads by cosines and sines.
COSINES = frozenset({"Qwen3ForCausalLM"})
MODELS = frozenset({"LlamaForCausalLM"}) | COSINES


class _Builder(Builder):
    """Counts the matmuls of a layer, of which selective checkpointing keeps the first, third and so on."""

    matmuls = 0
    argument: Value | None = None  # what a checkpoint holds beside its input

    def matmul(self, x: Value, weights: tuple[ModelWeight, ...], name: str, out: Dim) -> Value:
        """The linear layer `name` among the weights."""
        found = (weight for weight in weights if weight.name == name)
        y = ops.linear(self.tape, x, self.weight(*found), out, name)
        self.matmuls += 1
        if self.matmuls % 2:
            self.tape.cache(y)
        return y

    def rms(self, x: Value, norm: Norm, rows: Dim = ONE) -> Value:
        """nn.RMSNorm: one operator on CUDA, which keeps its input and an inverse root for each row."""
        with self.tape.part(norm.name):
            return ops.native_norm(self.tape, x, self.vector(norm), rows, 1)


def _complex(b: Builder, x: Value, tables: Value, name: str) -> Value:
    """fp32 pairs times the table's complex numbers, whose conjugates backward makes."""
    t = b.tape
    out = t.like(x, name)
    per_position = dim("d", tables.dim.size)

    def backward(g: Value, *saved: Value) -> tuple[Value]:
        conjugates = t.new("conjugates", per_position, POSITIONS, FULL)
        made = t.like(g)
        del conjugates
        return (made,)

    t.record([x], out, [tables], backward)
    return out


def _turned(b: Builder, query: Value, key: Value, tables: Value) -> tuple[Value, Value]:
    """Rotary positions on queries and keys."""
    t = b.tape
    with t.part("rotary"):
        if b.settings.router in COSINES:
            return _by_cosines(b, query, tables, "query"), _by_cosines(b, key, tables, "key")
        wide_query, wide_key = ops.cast(t, query, FULL, "fp32_query"), ops.cast(t, key, FULL, "fp32_key")
        turned_query = _complex(b, wide_query, tables, "turned_query")
        turned_key = _complex(b, wide_key, tables, "turned_key")
        return ops.cast(t, turned_query, query.bytes, "query"), ops.cast(t, turned_key, key.bytes, "key")


def _by_cosines(b: Builder, x: Value, tables: Value, name: str) -> Value:
    """x * cos + rotate_half(x) * sin"""
    t = b.tape
    half = Dim(x.dim.size // 2, rf"\frac{{{x.dim.latex}}}{{2}}", x.dim.numbers)
    straight = ops.mul(t, x, tables, "cosine")

    def rotated() -> Value:
        first, second = ops.slices(t, x, [half, half])
        return ops.join(t, [ops.scale(t, second), first], x.dim, "rotated")

    return ops.add(t, straight, ops.mul(t, rotated(), tables, "sine"), name)


def _attention(b: _Builder, x: Value, mixer: Attention, tables: Value) -> Value:
    weights = mixer.parts[0].weights
    a, k, d = (
        b.local(dim("a", mixer.num_attention_heads)),
        b.kv_heads(mixer.num_key_value_heads),
        dim("d", mixer.head_dim),
    )
    x = b.gather(x)
    query = b.matmul(x, weights, "query", a * d)
    key = b.matmul(x, weights, "key", k * d)
    value = b.matmul(x, weights, "value", k * d)
    if mixer.q_norm:
        query = b.rms(query, mixer.q_norm, a)
    if mixer.k_norm:
        key = b.rms(key, mixer.k_norm, k)
    query, key = _turned(b, query, key, tables)
    mixed = kernel(b, query, key, value, (a, k, d, d), 0)
    return b.scatter(b.matmul(mixed, weights, "output", dim("h", mixer.hidden_size)))


def _mlp(b: _Builder, x: Value, module: MLP) -> Value:
    """down(silu(gate(x)) * up(x))"""
    t, f = b.tape, b.local(dim(module.letter, module.intermediate_size))
    x = b.gather(x)
    activated = ops.unary(t, b.matmul(x, module.weights, "gate", f), "activated")
    inner = ops.mul(t, activated, b.matmul(x, module.weights, "up", f), "product")
    del activated
    return b.scatter(b.matmul(inner, module.weights, "down", dim("h", module.hidden_size)))


def _program(b: _Builder, layer: Layer, x: Value, tables: Value) -> Value:
    t = b.tape
    first, second = layer.norms
    if b.settings.router in COSINES:  # FSDP2 casts what a layer is given
        with t.part("attention"):
            tables = t.new("rotary_tables", Dim(2 * tables.dim.size, r"2 \cdot <d>", tables.dim.numbers), POSITIONS)
            b.argument = None if t.saving else tables
    with t.part("norms"):
        normal = b.rms(x, first)
    with t.part("attention"):
        x = ops.add(t, x, _attention(b, normal, layer.mixer, tables), "residual")  # type: ignore[arg-type]
    del normal
    with t.part("norms"):
        normal = b.rms(x, second)
    with t.part("mlp"):
        return ops.add(t, x, _mlp(b, normal, layer.feed_forward), "output")  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def layer_block(layer: Layer, path: tuple[str, ...], settings: Settings, recompute: str) -> Block:
    """One layer, whose checkpoint keeps nothing ("none" has no checkpoint), or what per-op selection keeps."""
    mixer = layer.mixer
    assert isinstance(mixer, Attention)

    def run(saving: bool) -> tuple[Block, _Builder]:
        b = _Builder(settings, layer, (), saving)
        tables = b.tape.new("tables", dim("d", mixer.head_dim), POSITIONS, FULL)
        b.tape.storages.clear()
        tables.storage.number = OUTSIDE
        if recompute == "selective" and not saving:
            b.tape.cached = []
        made = record(
            b, path, lambda held: _program(b, layer, held[0], tables), dim("h", mixer.hidden_size),
            settings.between, settings.bytes, True,
        )  # fmt: skip
        return made, b

    whole, builder = run(True)
    if recompute == "none":
        return whole
    first, outside = run(False)
    argument = (outside.argument.storage.number,) if outside.argument else ()
    return _again(first, whole, builder.tape.stop, argument)


def _again(first: Block, whole: Block, stop: int, arguments: tuple[int, ...]) -> Block:
    """A block that runs forward again before its backward, up to its last operator that saves anything.

    What the first run kept lies there already, and ends with its last reader; what the second run does not come to asks for
    lives on to the end of the block, as the input does, which the checkpoint holds (torch/utils/checkpoint.py).
    """
    kept = frozenset((0, *first.kept))
    again = whole.forward[: whole.forward.index(stop)]
    made = {event for event in again if event >= 0}
    unwound = made - {~event for event in again} - frozenset(whole.kept)
    held = kept - made | {*arguments}
    events = (
        [event for event in again if event not in kept] + [~number for number in sorted(unwound)] + [*whole.backward]
    )
    end = [~number for number in sorted(held)]
    backward = (*(event for event in events if ~event not in held), *end)
    return Block(
        whole.name, whole.storages, first.forward, backward, (0, *first.kept), whole.output, whole.output_gradient,
        whole.input_gradient,
    )  # fmt: skip


@lru_cache(maxsize=512)
def embedding_block(spec: ModelSpec, settings: Settings) -> Block:
    """The token table. Under tensor parallelism each rank looks up its own rows, and the sums are divided along the sequence."""
    b = Builder(settings)
    t = b.tape
    table = b.weight(spec.embeddings[0])

    def program(held: list[Value]) -> Value:
        tokens = held.pop()
        tokens.storage.number = OUTSIDE  # the caller's
        out = t.new("token", dim("h", spec.hidden_size))

        def backward(g: Value, *saved: Value) -> tuple[None]:
            ops.weight_gradient(t, table)
            return (None,)

        t.record([Edge()], out, [tokens], backward)
        return b.scatter(out)

    return record(b, ("embedding",), program, ONE, settings.between, LONG, False)


@lru_cache(maxsize=512)
def end_block(spec: ModelSpec, settings: Settings) -> Block:
    """Final norm and head."""
    b = _Builder(settings)
    vocabulary = b.local(dim("V", spec.vocab_size))
    norm = spec.final_norm
    assert norm is not None

    def program(held: list[Value]) -> Value:
        x = held.pop()
        with b.tape.part("final_norm"):
            x = b.rms(x, norm)
        with b.tape.part("head"):
            x = b.gather(x)
            return b.matmul(x, spec.head, spec.head[0].name, vocabulary)

    return record(b, ("end",), program, dim("h", spec.hidden_size), settings.between, settings.bytes, True)


@lru_cache(maxsize=512)
def loss_block(vocabulary: int, settings: Settings) -> Block:
    """Cross-entropy of the logits in fp32, outside the model; the logits live until it has ended."""
    b = Builder(settings)
    t = b.tape
    width = b.local(dim("V", vocabulary))

    def program(held: list[Value]) -> Value:
        wide = ops.cast(t, held[0], FULL, "fp32_logits")
        return (_divided_loss if settings.tp > 1 else _loss)(b, wide)

    return record(b, ("loss",), program, width, TOKENS, settings.bytes, True)


def _loss(b: Builder, wide: Value) -> Value:
    t = b.tape
    log = ops.softmax(t, wide, "log_probabilities", FULL)
    out = t.new("loss_sum", ONE, FIXED, FULL)
    total = t.new("total_weight", ONE, FIXED, FULL)
    ops.kernel(t, [log], out, [log, total])
    return out


def _divided_loss(b: Builder, wide: Value) -> Value:
    """Each rank's part of the vocabulary (torch/distributed/tensor/parallel/loss.py): backward makes the gradient of the
    logits at once, from the probabilities and a -1 for each label that lies on this rank."""
    t = b.tape

    def token(name: str, size: int) -> Value:
        return t.new(name, ONE, TOKENS, size)

    largest = token("largest", FULL)
    shifted = t.like(wide, "shifted")
    powers = t.like(wide, "powers")
    sums = token("sums", FULL)
    del powers
    logarithms = token("logarithms", FULL)
    log = t.like(wide, "log_probabilities")
    del shifted, largest, sums, logarithms
    t.record([wide], log, [log], lambda g, *saved: (g,))
    out = t.new("loss_sum", ONE, FIXED, FULL)
    total = t.new("total_weight", ONE, FIXED, FULL)
    meta = (log.dim, log.extent)

    def backward(g: Value, *saved: Value) -> tuple[Value]:
        places = [token("labels", LONG)]
        ones = t.new("ones", *meta, FULL)
        places += [token("own_labels", LONG), token("elsewhere", BOOL), token("updates", FULL), token("rows", LONG)]
        places.append(token("loss_gradients", FULL))
        powers = t.new("probabilities", *meta, FULL)
        both = t.new("sum", *meta, FULL)
        del powers
        made = t.new("gradient", *meta, FULL)
        del ones, both, places
        return (made,)

    t.record([log], out, [log, total], backward)
    return out
