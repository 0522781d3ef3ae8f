"""FLOPs of training by pass: forward, backward and what is computed again; of all weights, or of adapters on frozen ones.

A frozen weight's own gradient is left out, and so is every gradient of an input that nothing before it needs: the first layer's
projections read the embedding, which is frozen too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from calc.errors import InputError
from calc.flops.per_token import core_flops, token_flops
from calc.model.feed_forward import MoE
from calc.model.mixers import Attention
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Weight


class PassFlops(NamedTuple):
    """FLOPs of one token by pass. `model` leaves out what is computed again, `hardware` counts it."""

    forward: int
    backward: int
    recomputed: int = 0

    @property
    def model(self) -> int:
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        return self.model + self.recomputed


def pass_flops(spec: ModelSpec, seq: int, recompute: str = "none", *, causal: bool = True) -> PassFlops:
    """FLOPs of one token where all weights train: the backward is twice the forward (PaLM, arXiv 2204.02311, appendix B)."""
    one = token_flops(spec, seq, causal)
    again = {"full": one.layers, "selective": one.attention}.get(recompute, 0)
    return PassFlops(one.forward, 2 * one.forward, again)


@dataclass(slots=True)
class _Adapter:
    """One adapter of rank r: A is r x inputs, B is outputs x r; a fused projection has one for all its parts."""

    inputs: int
    reads_gradient: bool  # whether its input's gradient is needed
    outputs: int = 0


@dataclass(slots=True)
class _Layer:
    """FLOPs of one layer's adapters forward, and of its backward."""

    forward: int = 0
    backward: int = 0
    adapters: dict[str, _Adapter] = field(default_factory=dict)

    def weight(self, weight: Weight, copies: int, *, reads: bool, adapted: bool) -> bool:
        """Count a frozen weight; whether its output's gradient is needed: of its input, or of its adapter."""
        if reads:
            self.backward += 2 * weight.parameters * copies
        if adapted:
            outputs, inputs = (dimension.size for dimension in weight.shape)
            made = self.adapters.setdefault(weight.module, _Adapter(inputs, reads))
            made.outputs += outputs
        return reads or adapted

    def close(self, rank: int) -> None:
        """Count the adapters: two products forward, two for their own gradients, one or two for their inputs'."""
        for one in self.adapters.values():
            both = 2 * rank * (one.inputs + one.outputs)
            self.forward += both
            self.backward += both + 2 * rank * (one.outputs + (one.inputs if one.reads_gradient else 0))


def adapter_flops(
    spec: ModelSpec,
    seq: int,
    rank: int,
    takes: Callable[[str], bool],
    recompute: str = "none",
    *,
    causal: bool = True,
    fused_attention: bool = True,
) -> PassFlops:
    """FLOPs of one token where only LoRA's adapters train, on the layers' linear modules that `takes` names.

    `fused_attention`: one kernel computes all of attention's gradients; without it those that nobody needs are spared. InputError
    for layers other than attention with a feed-forward, whose gradients of inputs are not followed.
    """
    one = token_flops(spec, seq, causal)
    kinds = spec.layers.kinds
    for kind in kinds:
        if not isinstance(kind.mixer, Attention) or kind.second or kind.cross or kind.parallel or kind.extra:
            raise InputError.of(
                "method", "lora", f"FLOPs of adapters are counted for layers of attention, not for {spec.name}"
            )
    cores = [core_flops(kind.mixer, seq, causal) for kind in kinds if isinstance(kind.mixer, Attention)]
    forward, backward = one.forward, one.head
    first = spec.layers.pattern[0]
    for index, (kind, count) in enumerate(zip(kinds, spec.layers.counts, strict=True)):
        others = _layer(kind, cores[index], rank, takes, read=True, fused=fused_attention)
        forward += count * others.forward
        backward += (count - (index == first)) * others.backward
    backward += _layer(kinds[first], cores[first], rank, takes, read=False, fused=fused_attention).backward
    again = {"full": one.layers + forward - one.forward, "selective": one.attention}.get(recompute, 0)
    return PassFlops(forward, backward, again)


def _layer(kind: Layer, core: int, rank: int, takes: Callable[[str], bool], *, read: bool, fused: bool) -> _Layer:
    """One layer's adapters and backward; `read`: the gradient of the layer's input is needed."""
    found = _Layer()
    needs: dict[str, bool] = {}
    output: list[Weight] = []
    mixer = kind.mixer
    assert mixer
    for part in mixer.parts:
        for weight in _products(part.weights):
            if weight.name == "output":
                output.append(weight)
            else:
                needs[weight.name] = found.weight(weight, part.active, reads=read, adapted=takes(weight.module))
    query, key, value = (needs.get(name, read) for name in ("query", "key", "value"))
    anything = query or key or value
    if fused:
        found.backward += 2 * core if anything else 0
    else:  # half a core for each of: scores' gradient, the queries', the keys', the values'
        found.backward += core // 2 * sum((query or key, query, key, value))
    for weight in output:
        anything = found.weight(weight, 1, reads=anything, adapted=takes(weight.module))
    _feed_forward(kind, found, takes, read=read or anything)
    found.close(rank)
    return found


def _feed_forward(kind: Layer, found: _Layer, takes: Callable[[str], bool], *, read: bool) -> None:
    feed = kind.feed_forward
    if feed is None:
        return
    for part in feed.parts:
        inner = read
        adaptable = not (part.expert and isinstance(feed, MoE))
        for weight in _products(part.weights):
            last = weight.name == "down"
            adapted = adaptable and takes(weight.module)
            inner = found.weight(weight, part.active, reads=inner if last else read, adapted=adapted) or inner


def _products(weights: tuple[Weight, ...]) -> Iterator[Weight]:
    return (weight for weight in weights if weight.matmul)
