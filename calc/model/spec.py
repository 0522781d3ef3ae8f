"""ModelSpec: a model as data, exact to one parameter, whatever family it comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from calc.errors import InputError
from calc.model.feed_forward import FeedForward
from calc.model.mixers import Attention, Mixer
from calc.model.weights import Norm, Part, Weight

if TYPE_CHECKING:
    from calc.quantization.format import Quantization


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: what mixes tokens, what transforms each, and the norms around them. Either may be absent (a hybrid's
    layer, a pruned one). `parallel`: both read the same input (GPT-J, Cohere). `cross` attends to an encoder's output. `second` is
    another mixer of the layer, with weights of its own (Falcon-H1, Zamba). `reused`: mixer, feed-forward and norms are those of an
    earlier layer, computed once more and held once."""

    kind: str  # names the component where a model has several: "dense", "moe", "sliding", ...
    mixer: Mixer | None
    feed_forward: FeedForward | None
    norms: tuple[Norm, ...]
    parallel: bool = False
    cross: Attention | None = None
    extra: tuple[Part, ...] = ()
    second: Mixer | None = None
    reused: bool = False

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """What mixes tokens here: none, one or two."""
        return tuple(mixer for mixer in (self.mixer, self.second) if mixer)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Every weight of the layer, in groups: mixer, cross-attention, feed-forward, norms, second mixer, the rest. What an
        earlier layer holds has no copies here, and is as active as there."""
        parts: list[Part] = []
        if self.mixer:
            parts += self.mixer.parts
        if self.cross:
            parts += (Part("cross_attention", part.weights) for part in self.cross.parts)
        if self.feed_forward:
            parts += self.feed_forward.parts
        norms = tuple(weight for norm in self.norms for weight in norm.weights)
        if norms:
            parts.append(Part("norms", norms))
        if self.reused:
            parts = [replace(part, copies=0) for part in parts]
        return (*parts, *(self.second.parts if self.second else ()), *self.extra)


@dataclass(frozen=True, eq=False)
class Stack:
    """Layers in order: `pattern[i]` is the index in `kinds` of layer i."""

    kinds: tuple[Layer, ...]
    pattern: tuple[int, ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many layers of each kind."""
        found = Counter(self.pattern)
        return tuple(found[index] for index in range(len(self.kinds)))

    @cached_property
    def kind_parts(self) -> tuple[tuple[Part, ...], ...]:
        """`parts` of each kind of layer, made once."""
        return tuple(kind.parts for kind in self.kinds)

    def __len__(self) -> int:
        return len(self.pattern)

    def __iter__(self) -> Iterator[Layer]:
        return (self.kinds[index] for index in self.pattern)


@dataclass(frozen=True, eq=False)
class Tower:
    """A part of the model besides the language decoder: a vision or audio encoder, a projector, a text encoder, the
    multi-token-prediction layers. `in_total` is False for what the published checkpoint holds but the model class does not build."""

    name: str
    stack: Stack
    parts: tuple[Part, ...] = ()
    in_total: bool = True


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """A model: embeddings, a stack of layers, a final norm, a head, and what else it has.

    `assumptions` lists what the config left to its class; `unread` the config's fields that no rule understood.
    """

    name: str
    architecture: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int  # 0: unknown or unbounded
    layers: Stack
    embeddings: tuple[Weight, ...]
    final_norm: Norm | None
    head: tuple[Weight, ...]  # () when tied, or when there is none
    tied: bool
    source: str
    url: str = ""
    has_head: bool = True  # False for encoders that end at the last hidden state
    other: tuple[Part, ...] = ()  # prediction-head transforms, poolers, embedding projections
    towers: tuple[Tower, ...] = ()
    dtype: str = "bf16"  # the config's own storage type
    dropout: tuple[tuple[str, float], ...] = ()  # ("attention", p), ("residual", p), ("embedding", p) where p > 0
    logit_softcap: bool = False
    head_scale: bool = False  # logits are multiplied by a constant after the head
    embedding_scale: bool = False  # embeddings are multiplied by a constant
    assumptions: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    quantization: Quantization | None = None  # what the checkpoint declares of its weights
    scaled_positions: int = 0  # positions that rotary scaling (YaRN, linear, dynamic) makes of them; 0: none
    estimates: tuple[str, ...] = ()  # what the class's program does that the training ledger does not hold

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def generates(self) -> bool:
        """Whether it makes text token by token: it has a head, and each token reads only those before it."""
        return self.has_head and all(
            getattr(mixer, "causal", True) for kind in self.layers.kinds for mixer in kind.mixers
        )

    def refuse_stages(self, pp: int) -> None:
        """InputError where a pipeline would part layers from weights that they share."""
        if pp > 1 and any(kind.reused for kind in self.layers.kinds):
            raise InputError.of("pp", pp, f"layers of {self.name} share their weights, so it must be 1")

    def must_read_text(self) -> None:
        """InputError for an encoder of pictures alone: it has no vocabulary, and no sequence of tokens passes it."""
        if not self.vocab_size:
            raise InputError(
                f"model: {self.architecture} reads pictures, not text; params counts it, and no other question is answered for it",
                "model",
            )

    def beyond_positions(self, what: str, tokens: int) -> list[str]:
        """The remark that so many tokens are more than the model has positions for; nothing when they are not."""
        most = max(self.max_position_embeddings, self.scaled_positions)
        if not 0 < most < tokens:
            return []
        scaled = " (rotary scaling included)" if self.scaled_positions > self.max_position_embeddings else ""
        return [f"{what} {tokens:,} is beyond the model's {most:,} positions{scaled}"]
