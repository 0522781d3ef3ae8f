"""What torchtitan's layers are made of: linear layers and norms, rotary positions, attention and MLPs, written on a tape."""

from __future__ import annotations

from calc.model.feed_forward import MLP
from calc.model.mixers import Attention, LatentAttention
from calc.model.weights import Dim, Norm, dim
from calc.model.weights import Weight as ModelWeight
from calc.training.autograd import operators as ops
from calc.training.autograd.attention import expanded, kernel, rotary
from calc.training.autograd.builder import Builder
from calc.training.autograd.operators import FULL, ONE
from calc.training.autograd.tape import POSITIONS, Value


class TitanBuilder(Builder):
    """Counts the matmuls of a layer, of which selective checkpointing keeps the first, third and so on."""

    matmuls = 0
    argument: Value | None = None  # what a checkpoint holds besides its input

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


def turned(b: Builder, query: Value, key: Value, tables: Value) -> tuple[Value, Value]:
    """Rotary positions on queries and keys."""
    t = b.tape
    with t.part("rotary"):
        if b.model_class.torchtitan == "cosines":
            return rotary(b, query, tables, "query"), rotary(b, key, tables, "key")
        wide_query, wide_key = ops.cast(t, query, FULL, "fp32_query"), ops.cast(t, key, FULL, "fp32_key")
        turned_query = _complex(b, wide_query, tables, "turned_query")
        turned_key = _complex(b, wide_key, tables, "turned_key")
        return ops.cast(t, turned_query, query.bytes, "query"), ops.cast(t, turned_key, key.bytes, "key")


def _turned_alone(b: Builder, x: Value, tables: Value, name: str) -> Value:
    """Rotary positions on one tensor, as complex numbers."""
    t = b.tape
    with t.part("rotary"):
        wide = ops.cast(t, x, FULL, f"fp32_{name}")
        return ops.cast(t, _complex(b, wide, tables, f"turned_{name}"), x.bytes, name)


def attention(b: TitanBuilder, x: Value, mixer: Attention, tables: Value) -> Value:
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
    query, key = turned(b, query, key, tables)
    mixed = kernel(b, query, key, value, (a, k, d, d), 0)
    return b.scatter(b.matmul(mixed, weights, "output", dim("h", mixer.hidden_size)))


def mlp(b: TitanBuilder, x: Value, module: MLP, *, between: bool = True) -> Value:
    """down(silu(gate(x)) * up(x)). `between`: it stands between parts that divide the sequence, and gathers and scatters it."""
    t, f = b.tape, b.local(dim(module.letter, module.intermediate_size))
    x = b.gather(x) if between else x
    activated = ops.unary(t, b.matmul(x, module.weights, "gate", f), "activated")
    inner = ops.mul(t, activated, b.matmul(x, module.weights, "up", f), "product")
    del activated
    out = b.matmul(inner, module.weights, "down", dim("h", module.hidden_size))
    return b.scatter(out) if between else out


def latent(b: TitanBuilder, x: Value, mixer: LatentAttention, tables: Value) -> Value:
    """Multi-head latent attention, its keys and values expanded to all heads."""
    t, weights = b.tape, mixer.parts[0].weights
    a, h = b.local(dim("a", mixer.num_attention_heads)), dim("h", mixer.hidden_size)
    x = b.gather(x)
    nope, rope, d_v = (
        dim("d_n", mixer.qk_nope_head_dim),
        dim("d_r", mixer.qk_rope_head_dim),
        dim("d_v", mixer.v_head_dim),
    )
    rank, r_q = dim("r_kv", mixer.kv_lora_rank), dim("r_q", mixer.q_lora_rank)
    norms = {norm.name: norm for norm in mixer.norms}
    if mixer.q_lora_rank:
        query = b.matmul(x, weights, "query_down", r_q)
        query = b.matmul(b.rms(query, norms["q_norm"]), weights, "query_up", a * (nope + rope))
    else:
        query = b.matmul(x, weights, "query", a * (nope + rope))
    passed, rotary_part = ops.split(t, query, [a * nope, a * rope])
    rotary_part = _turned_alone(b, rotary_part, tables, "query")
    query = ops.join(t, [passed, rotary_part], a * (nope + rope), "query")
    latents = b.matmul(x, weights, "key_value_down", rank + rope)
    low, key_rope = ops.split(t, latents, [rank, rope])
    del latents
    key_rope = _turned_alone(b, key_rope, tables, "key")
    low = b.rms(low, norms["kv_norm"])
    key_value = b.matmul(low, weights, "key_value_up", a * (nope + d_v))
    del low
    key_pass, value = ops.split(t, key_value, [a * nope, a * d_v])
    del key_value
    key = ops.join(t, [key_pass, expanded(b, key_rope, a * rope)], a * (nope + rope), "key")
    mixed = kernel(b, query, key, value, (a, a, nope + rope, d_v), 0)
    return b.scatter(b.matmul(mixed, weights, "output", h))
