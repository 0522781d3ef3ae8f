"""torchtitan's own programs of Llama 3, Qwen3 and DeepSeek-V3 decoders: a layer, and the embedding.

torchtitan 0.2.2: nn.RMSNorm as one operator, rotary positions turned as complex numbers in fp32 (Qwen3: by cosines and sines),
PyTorch's attention kernels, a loss outside the model. Checkpoints wrap one layer each; those of
selective recomputation keep every second matmul's output from the first on, the attention kernel's, and reduce-scatters'.
"""

from __future__ import annotations

from functools import lru_cache

from calc.model.feed_forward import MoE
from calc.model.mixers import Attention, LatentAttention, Mixer
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Dim, dim
from calc.training.autograd import operators as ops
from calc.training.autograd.blocks import OUTSIDE, Block, record
from calc.training.autograd.builder import Builder, Settings
from calc.training.autograd.operators import FULL, LONG, ONE
from calc.training.autograd.tape import POSITIONS, Edge, Tape, Value
from calc.training.torchtitan.compiled import compiled_layer
from calc.training.torchtitan.experts import moe
from calc.training.torchtitan.layers import TitanBuilder, attention, latent, mlp


def _mixed(b: TitanBuilder, x: Value, mixer: Mixer | None, tables: Value) -> Value:
    if isinstance(mixer, LatentAttention):
        return latent(b, x, mixer, tables)
    assert isinstance(mixer, Attention)
    return attention(b, x, mixer, tables)


def _program(b: TitanBuilder, layer: Layer, x: Value, tables: Value) -> Value:
    t = b.tape
    first, second = layer.norms
    if b.model_class.torchtitan == "cosines":  # FSDP2 casts what a layer is given
        with t.part("attention"):
            tables = t.new("rotary_tables", Dim(2 * tables.dim.size, r"2 \cdot <d>", tables.dim.numbers), POSITIONS)
            b.argument = None if t.saving else tables
    with t.part("norms"):
        normal = b.rms(x, first)
    with t.part("attention"):
        mixed = _mixed(b, normal, layer.mixer, tables)
        x = ops.add(t, x, mixed, "residual")
        del mixed
    del normal
    with t.part("norms"):
        normal = b.rms(x, second)
    if isinstance(layer.feed_forward, MoE):
        return ops.add(t, x, moe(b, normal, layer.feed_forward), "output")
    with t.part("mlp"):
        return ops.add(t, x, mlp(b, normal, layer.feed_forward), "output")  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def layer_block(
    layer: Layer, path: tuple[str, ...], settings: Settings, recompute: str, compiled: bool = False
) -> Block:
    """One layer, whose checkpoint keeps nothing ("none" has no checkpoint), or what per-op selection keeps."""
    mixer = layer.mixer
    program = compiled_layer if compiled else _program
    assert isinstance(mixer, Attention | LatentAttention)
    turned = mixer.qk_rope_head_dim if isinstance(mixer, LatentAttention) else mixer.head_dim

    def run(saving: bool) -> tuple[Block, TitanBuilder]:
        b = TitanBuilder(settings, layer, (), saving)
        tables = b.tape.new("tables", dim("d", turned), POSITIONS, FULL)
        b.tape.storages.clear()
        tables.storage.number = OUTSIDE
        if recompute == "selective" and not saving:
            b.tape.cached = []
        made = record(
            b, path, lambda held: program(b, layer, held[0], tables), dim("h", mixer.hidden_size),
            settings.between, settings.bytes, True,
        )  # fmt: skip
        return made, b

    whole, builder = run(True)
    if recompute == "none":
        return whole
    first, outside = run(False)
    argument = (outside.argument.storage.number,) if outside.argument else ()
    return _again(first, whole, builder.tape, argument)


def _again(first: Block, whole: Block, tape: Tape, arguments: tuple[int, ...]) -> Block:
    """A block that runs forward again when its backward first asks for what was saved, up to its last operator that saves.

    What the first run kept lies there already, and ends with its last reader; what the second run does not come to asks for
    lives on to the end of the block, as the input does, which the checkpoint holds (torch/utils/checkpoint.py).
    """
    kept = frozenset((0, *first.kept))
    again = whole.forward[: whole.forward.index(tape.stop)]
    made = {event for event in again if event >= 0}
    unwound = made - {~event for event in again} - frozenset(whole.kept)
    held = kept - made | {*arguments}
    events = [event for event in again if event not in kept] + [~number for number in sorted(unwound)]
    events = [*whole.backward[: tape.asks], *events, *whole.backward[tape.asks :]]
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
