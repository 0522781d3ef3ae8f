"""A weight tensor: its name, its dimensions as letters and numbers, and how tensor parallelism divides it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod

from calc.breakdown import Number


class Split(StrEnum):
    """What tensor parallelism divides (Megatron-LM, arXiv 1909.08053, section 3)."""

    NONE = "none"  # every rank holds a copy: norms, routers, MLA's down-projections
    OUTPUT = "output"  # column parallel: the output features, and the bias with them
    INPUT = "input"  # row parallel: the input features; the bias is copied
    KV = "kv"  # column parallel by KV head: a rank holds at least one head
    VOCAB = "vocab"  # the vocabulary of the embedding or the head


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension: its size, and the formula of that size in the notation of `calc.breakdown.Formula`."""

    size: int
    latex: str
    numbers: tuple[tuple[str, Number], ...]

    def __mul__(self, other: Dim) -> Dim:
        return Dim(self.size * other.size, rf"{self.latex} \cdot {other.latex}", self.numbers + other.numbers)

    def __add__(self, other: Dim) -> Dim:
        return Dim(self.size + other.size, f"({self.latex} + {other.latex})", self.numbers + other.numbers)


def dim(letter: str, size: int) -> Dim:
    """A dimension with a letter: `dim("h", 4096)`."""
    return Dim(size, f"<{letter}>", ((letter, size),))


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor, or the part of a fused one that plays its own role.

    `module` is the Hugging Face name of the nn.Linear (or Conv1D) that holds it, which LoRA targets; parts of a fused
    projection share it. `shape` is (output, input) for a projection and (size,) for a norm or a bias; its product is the count.
    `matmul` is True where each token is multiplied by the tensor: 2 FLOPs an element. `convolution`: `module` is one over patches.
    `wide`: checkpoints keep the tensor in fp32, whatever the others are stored in.
    """

    name: str
    shape: tuple[Dim, ...]
    split: Split = Split.NONE
    module: str = ""
    matmul: bool = False
    convolution: bool = False
    wide: bool = False

    @property
    def parameters(self) -> int:
        return prod(dimension.size for dimension in self.shape)

    @property
    def latex(self) -> str:
        return r" \cdot ".join(dimension.latex for dimension in self.shape)

    @property
    def numbers(self) -> dict[str, Number]:
        return {letter: value for dimension in self.shape for letter, value in dimension.numbers}


def linear(
    name: str, module: str, output: Dim, inputs: Dim, split: Split = Split.NONE, bias: bool = False
) -> tuple[Weight, ...]:
    """The weights of a linear layer of shape (output, inputs), with its bias where it has one."""
    weight = Weight(name, (output, inputs), split, module, matmul=True)
    if not bias:
        return (weight,)
    bias_split = split if split in (Split.OUTPUT, Split.KV, Split.VOCAB) else Split.NONE
    return (weight, Weight(f"{name}_bias", (output,), bias_split))


def convolution(name: str, module: str, output: Dim, inputs: Dim, bias: bool = False) -> tuple[Weight, ...]:
    """The weights of a convolution whose steps are as long as its kernel: a linear layer over patches, but no nn.Linear."""
    weight, *rest = linear(name, module, output, inputs, bias=bias)
    return (replace(weight, convolution=True), *rest)


@dataclass(frozen=True, slots=True)
class Part:
    """Weights that belong together, in `copies` equal copies of which a token uses `active`: experts; everything else has one."""

    name: str
    weights: tuple[Weight, ...]
    copies: int = 1
    active: int = 1
    expert: bool = False  # expert parallelism divides the copies

    @property
    def parameters(self) -> int:
        return self.copies * sum(weight.parameters for weight in self.weights)

    @property
    def active_parameters(self) -> int:
        return self.active * sum(weight.parameters for weight in self.weights)


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation over `size` features. `kind` is "rms" or "layer"; `style` is the program that computes it, which
    decides what it saves for backward: "llama" (scale by w after the cast), "wide" (scale by w before it), "gemma" (scale by
    1 + w before it), "native" (one torch operator, F.rms_norm or F.layer_norm)."""

    name: str
    size: Dim
    kind: str = "rms"
    style: str = "llama"
    weight: bool = True
    bias: bool = False
    split: Split = Split.NONE

    @property
    def weights(self) -> tuple[Weight, ...]:
        found = []
        if self.weight:
            found.append(Weight(self.name, (self.size,), self.split))
        if self.bias:
            found.append(Weight(f"{self.name}_bias", (self.size,), self.split))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class State:
    """What one sequence keeps in the cache whatever its length: `elements` of `dtype` ("" = the model's own).

    `taps` above 0: the last inputs of a convolution with so many taps, the newest included; some engines keep one less.
    """

    name: str
    elements: Dim
    dtype: str = ""
    split: Split = Split.NONE
    taps: int = 0
