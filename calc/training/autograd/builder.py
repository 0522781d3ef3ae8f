"""What every part of the transformers program needs: the settings of one layer, its sizes on one rank, its weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from calc.model.spec import Layer
from calc.model.weights import Dim, Norm, dim
from calc.model.weights import Weight as ModelWeight
from calc.training.autograd import liger_operators as liger
from calc.training.autograd import operators as ops
from calc.training.autograd.adapters import adapted, quantised_linear, scaled
from calc.training.autograd.norms import NORMS
from calc.training.autograd.operators import ONE
from calc.training.autograd.tape import TOKENS, Extent, Tape, Value, Weight
from calc.training.model_classes import LigerPatches, model_class
from calc.training.states.tensors import Lora, tensor_of
from calc.units import ceil_div


@dataclass(frozen=True, slots=True)
class Settings:
    """What a layer's program depends on besides the layer itself: number formats, kernels, layout, adapters.

    `bytes` is the model's format and `architecture` its class, whose own ways the program follows.
    """

    bytes: int = 2
    autocast: bool = False
    attention: str = "sdpa"
    dropout: tuple[tuple[str, float], ...] = ()
    tp: int = 1
    ep: int = 1
    whole_experts: bool = False  # tensor-parallel ranks share the experts, each of which is whole
    experts_of: str = ""  # of the plan's field
    sharded_sequence: bool = False
    lora: Lora | None = None
    architecture: str = ""
    several: bool = True  # sequences in a batch: then batched matmuls of eager attention copy heads that lie apart
    longest_masked: int = 0  # the longest window that the sequence fills, so that it needs a mask
    liger: LigerPatches | None = None  # Liger-Kernel's operators in the place of the model's own
    frozen: bool = False  # a pass that no gradient follows
    loss_format: str = "fp32"  # of the plan's field
    litgpt: bool = False
    torchtune: bool = False
    compiled: bool = False  # torch.compile compiles each layer
    compiled_loss: bool = False

    @property
    def trains(self) -> bool:
        """Whether the model's own weights train."""
        return self.lora is None and not self.frozen

    @property
    def trains_embedding(self) -> bool:
        return self.trains or (self.lora is not None and self.lora.saves_embedding and not self.frozen)

    @property
    def trains_head(self) -> bool:
        return self.trains or (self.lora is not None and self.lora.saves_head and not self.frozen)

    @property
    def between(self) -> Extent:
        """The extent of tensors between the tensor-parallel blocks."""
        return Extent(1, 1, self.tp) if self.sharded_sequence else TOKENS

    def probability(self, place: str) -> float:
        return dict(self.dropout).get(place, 0.0)


class Builder:
    """Writes one block of the program on a tape: the pieces that its parts share."""

    def __init__(
        self, settings: Settings, layer: Layer | None = None, modules: tuple[str, ...] = (), saving: bool = True
    ) -> None:
        self.settings, self.layer, self.modules = settings, layer, modules
        self.model_class = model_class(settings.architecture)
        transposed = layer is not None and self.model_class.transposed_weights
        self.tape = Tape(settings.bytes, settings.autocast, saving, transposed)

    @property
    def expert_tp(self) -> int:
        """Ranks that divide each expert."""
        return 1 if self.settings.whole_experts else self.settings.tp

    def local(self, size: Dim) -> Dim:
        """A dimension that tensor parallelism divides."""
        tp = self.settings.tp
        if tp == 1:
            return size
        return Dim(ceil_div(size.size, tp), rf"\lceil \frac{{{size.latex}}}{{<t>}} \rceil", (*size.numbers, ("t", tp)))

    def kv_heads(self, heads: int) -> Dim:
        """Key and value heads on one rank: at least one."""
        k, tp = dim("k", heads), self.settings.tp
        if tp == 1:
            return k
        return Dim(max(1, heads // tp), r"\max(1, \frac{<k>}{<t>})", (*k.numbers, ("t", tp)))

    def weight(self, *weights: ModelWeight, copies: int = 1, tp: int | None = None) -> Weight:
        """Weights that one tensor holds, on one rank of `tp`, left out: the settings'."""
        tp = self.settings.tp if tp is None else tp
        elements = sum(tensor_of((), weight, self.layer, tp, copies, "", False).elements for weight in weights)
        latex = " + ".join(weight.latex for weight in weights)
        numbers = tuple(item for weight in weights for item in weight.numbers.items())
        size = (
            Dim(elements, "<elements>", (("elements", elements),))
            if tp > 1 or copies > 1
            else Dim(elements, f"({latex})", numbers)
        )
        return Weight("_".join(weight.name for weight in weights), size, self.settings.trains, self.settings.bytes)

    def gather(self, x: Value) -> Value:
        """The whole sequence of what sequence parallelism divides: a copy, which the projections then keep (DTensor)."""
        if not self.settings.sharded_sequence:
            return x
        out = self.tape.new("whole_sequence", x.dim, TOKENS, x.bytes)
        meta = (x.dim, x.extent, x.bytes)
        self.tape.record([x], out, [], lambda g: (self.tape.new("gradient", *meta),))
        return out

    def scatter(self, x: Value, *, keeps: bool = True) -> Value:
        """A partial sum over the ranks, summed and divided along the sequence again, and kept where selective checkpoints ask for it."""
        if not self.settings.sharded_sequence:
            return x
        out = self.tape.new("own_sequence", x.dim, self.settings.between, x.bytes)
        if keeps:
            self.tape.cache(out)
        meta = (x.dim, x.extent, x.bytes)
        self.tape.record([x], out, [], lambda g: (self.tape.new("gradient", *meta),))
        return out

    def norm(self, x: Value, norm: Norm, rows: Dim = ONE, name: str = "") -> Value:
        """A norm by the program that its style names; `rows` are the groups of features that are normalised alone."""
        with self.tape.part(name or norm.name):
            if self.settings.liger:
                return liger.norm(self.tape, x, self.vector(norm), rows, self.settings.liger.in_place)
            program = NORMS[norm.kind if norm.style == "native" else norm.style]
            return program(self.tape, x, norm, self.vector(norm), rows)

    def vector(self, norm: Norm) -> Weight:
        lora = self.settings.lora
        trains = self.settings.trains or (lora is not None and lora.scales and not self.settings.frozen)
        return Weight("weight", norm.size, trains, self.settings.bytes)

    def linear(self, x: Value, weights: Iterable[ModelWeight], out: Dim, name: str, module: str) -> Value:
        """A linear layer, with its adapter where LoRA takes it. Weights beyond the first of a fused one lie in one tensor."""
        found = tuple(weights)
        matrices = tuple(weight for weight in found if weight.matmul)
        biases = tuple(weight for weight in found if not weight.matmul)
        bias = self.weight(*biases) if biases else None
        lora = self.settings.lora
        quantised = lora is not None and lora.quantised and module in self.modules
        if lora and quantised:
            y = quantised_linear(self.tape, x, self.weight(*matrices), out, name, lora)
        else:
            y = ops.linear(self.tape, x, self.weight(*matrices), out, name, bias)
        takes = lora is not None and (
            lora.litgpt_adapts(matrices[0].name if matrices else "")
            if lora.litgpt
            else lora.takes(self.modules, module)
        )
        if lora and matrices and takes:  # no weight: it is an earlier layer's
            return adapted(self.tape, x, y, (matrices[0].shape[1], out), name, lora, bias is not None)
        return scaled(self.tape, y, name) if lora and lora.scales and not self.settings.frozen else y
