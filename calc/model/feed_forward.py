"""What transforms each token alone: a plain or gated MLP, or a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from calc.model.weights import Dim, Part, Split, Weight, dim, linear


@dataclass(frozen=True, slots=True)
class MLP:
    """down(act(gate(x)) * up(x)) when gated, down(act(up(x))) when not.

    `modules` are the Hugging Face names of gate, up and down; gate and up are equal where one tensor holds both.
    `extra` holds what else it learns: the activation's own parameters, a norm inside.
    """

    hidden_size: int
    intermediate_size: int
    gated: bool = True
    bias: bool = False
    activation: str = "silu"
    modules: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    letter: str = "f"
    extra: tuple[Weight, ...] = ()

    @property
    def weights(self) -> tuple[Weight, ...]:
        h, f = dim("h", self.hidden_size), dim(self.letter, self.intermediate_size)
        gate, up, down = self.modules
        first = linear("gate", gate, f, h, Split.OUTPUT, self.bias) if self.gated else ()
        return (
            *first,
            *linear("up", up, f, h, Split.OUTPUT, self.bias),
            *linear("down", down, h, f, Split.INPUT, self.bias),
            *self.extra,
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part("mlp", self.weights),)


@dataclass(frozen=True, slots=True)
class MoE:
    """A router and `num_experts` equal experts, of which each token uses `num_experts_per_tok`; `shared` serves every token.

    `router` holds the router's own tensors. `grouped` tells that all experts live in one tensor a projection (transformers 5).
    `apart`: checkpoints call `shared` the layer's mlp, and the experts stand next to it (Gemma 4).
    """

    hidden_size: int
    num_experts: int
    num_experts_per_tok: int
    expert: MLP
    router: tuple[Weight, ...]
    shared: MLP | None = None
    shared_gate: bool = False
    extra: tuple[Part, ...] = ()
    apart: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        parts = [
            Part("router", self.router),
            Part("experts", self.expert.weights, self.num_experts, self.num_experts_per_tok, expert=True),
        ]
        if self.shared:
            gate = (
                linear("gate_scalar", "shared_expert_gate", dim("1", 1), dim("h", self.hidden_size))
                if self.shared_gate
                else ()
            )
            parts.append(Part("shared_expert", (*self.shared.weights, *gate)))
        return (*parts, *self.extra)


def router(hidden_size: int, num_experts: int, bias: bool = False, module: str = "") -> tuple[Weight, ...]:
    """A linear router over the experts: num_experts x hidden_size, copied on every rank."""
    experts: Dim = dim("E", num_experts)
    return linear("router", module, experts, dim("h", hidden_size), Split.NONE, bias)


FeedForward = MLP | MoE
