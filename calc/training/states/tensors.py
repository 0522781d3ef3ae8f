"""The weights that one device holds: every tensor with its elements after tensor and expert parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Literal

from calc.breakdown import Number
from calc.model.mixers import Attention
from calc.model.spec import Layer, ModelSpec, Stack
from calc.model.weights import Part, Split, Weight
from calc.training.model_classes import model_class
from calc.training.states.base_formats import BaseFormat
from calc.units import ceil_div


@dataclass(frozen=True, slots=True)
class Tensor:
    """One weight on one device. `path` is its place in the model; `copies` the experts held here (1 for the rest).

    `first` is the first dimension, which FSDP2 shards, `rest` the product of the others. `storage` names what holds it:
    parts of a fused projection share one. `matrix`: a hidden matrix, as Muon sees it. `adapter`: one of LoRA's.
    """

    path: tuple[str, ...]
    copies: int
    first: int
    rest: int
    first_latex: str
    rest_latex: str
    numbers: tuple[tuple[str, Number], ...]
    storage: str
    expert: bool = False
    matrix: bool = False
    adapter: int = 0  # bytes of a number of an adapter
    frozen: bool = False  # it never trains: of a tower that no text reaches, of a reference
    wide: bool = False  # its model class keeps it in fp32
    quantised: BaseFormat | Literal[""] = ""  # the format in which it lies frozen
    saved: bool = False  # a copy that trains next to its frozen original (peft's modules_to_save)

    @property
    def elements(self) -> int:
        """Elements of all copies on this device."""
        return self.copies * self.first * self.rest


@dataclass(frozen=True, eq=False)
class Tensors:
    """A group that lies on a device together: one layer of a kind, the embedding, the head. Hashes by identity."""

    path: tuple[str, ...]  # where the group lies; its tensors' paths go on from there
    tensors: tuple[Tensor, ...]

    @cached_property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)


def _kv_divisor(layer: Layer | None, degree: int) -> tuple[int, str]:
    """How far tensor parallelism divides the KV heads: every rank holds at least one."""
    heads = layer.mixer.num_key_value_heads if layer and isinstance(layer.mixer, Attention) else degree
    if heads >= degree:
        return degree, "<t>"
    return heads, r"\min(<t>, <k>)"


def tensor_of(
    path: tuple[str, ...], weight: Weight, layer: Layer | None, tp: int, copies: int, storage: str, expert: bool
) -> Tensor:
    """The weight on one rank. A dimension that tp does not divide is padded up, as Megatron pads the vocabulary."""
    first, rest = weight.shape[0], weight.shape[1:]
    first_size, first_latex = first.size, first.latex
    rest_size, rest_latex = prod(dim.size for dim in rest), r" \cdot ".join(dim.latex for dim in rest)
    numbers: dict[str, Number] = weight.numbers
    if tp > 1 and weight.split is not Split.NONE:
        divisor, letter = _kv_divisor(layer, tp) if weight.split is Split.KV else (tp, "<t>")
        numbers["t"] = tp
        if "<k>" in letter and isinstance(layer and layer.mixer, Attention):
            numbers.setdefault("k", layer.mixer.num_key_value_heads)  # type: ignore[union-attr]
        if weight.split is Split.INPUT and rest:
            rest_size, rest_latex = _divided(rest_size, rest_latex, divisor, letter)
        else:
            first_size, first_latex = _divided(first_size, first_latex, divisor, letter)
    return Tensor(
        path, copies, first_size, rest_size, first_latex, rest_latex, tuple(numbers.items()), storage, expert,
        matrix=weight.matmul and layer is not None,
    )  # fmt: skip


def _divided(size: int, latex: str, divisor: int, letter: str) -> tuple[int, str]:
    return ceil_div(size, divisor), rf"\lceil \frac{{{latex}}}{{{letter}}} \rceil"


def _part(part: Part, layer: Layer | None, tp: int, ep: int, expert_tp: int | None = None) -> Iterator[Tensor]:
    copies = ceil_div(part.copies, ep) if part.expert else part.copies
    tp = expert_tp if part.expert and expert_tp is not None else tp
    storages: dict[str, str] = {}  # a bias lies in the storage of the weight that it follows
    for weight in part.weights:
        base = weight.name.removesuffix("_bias")
        module = storages.setdefault(base, weight.module or weight.name)
        suffix = "bias" if weight.name != base and base in storages else "weight"
        storage = f"{part.name}/{module}/{suffix if module != weight.name else ''}"
        yield tensor_of((part.name, weight.name), weight, layer, tp, copies, storage, part.expert)


# Names of the token table and of the head in transformers, by which peft's modules_to_save asks for them.
EMBEDDING_MODULES = frozenset({"embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings"})
HEAD_MODULES = frozenset({"lm_head", "embed_out", "output"})


Adapter = Literal["lora", "llama-adapter", "llama-adapter-v2"]
PROMPT, FIRST_ADAPTED = 10, 2  # litgpt/adapter.py: adapter_prompt_length and adapter_start_layer


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters of one rank on the linear layers named in `targets`; () means peft's own choice, "all-linear" all of them.

    `magnitude`: DoRA's, with a learned length for each output next to them. `quantised`: QLoRA's, next to linear layers in `base`.
    `width`: bytes of a number of the adapters. `dropout` of their inputs. `saved`: modules that train whole, as a copy
    (modules_to_save). `keeps_input`: bitsandbytes' 4-bit product keeps its input, as it did up to 0.42.
    """

    rank: int
    targets: tuple[str, ...]
    magnitude: bool = False
    quantised: bool = False
    base: BaseFormat = "nf4"
    width: int = 4
    dropout: float = 0.0
    saved: tuple[str, ...] = ()
    keeps_input: bool = False
    adapter: Adapter = "lora"  # of litgpt: what trains in the place of LoRA
    prompted: bool = True  # False: of a layer before those with prompts
    litgpt: bool = False  # its LoRAQKVLinear: one update for those of query, key and value that are adapted

    def litgpt_outputs(self, mixer: Attention) -> list[int]:
        """Output features of each projection that litgpt adapts, in the order of its fused one."""
        named = (
            ("query", mixer.num_attention_heads),
            ("key", mixer.num_key_value_heads),
            ("value", mixer.num_key_value_heads),
        )
        wanted = (self.targets or ("query", "value")) if self.adapter == "lora" else ()
        return [heads * mixer.head_dim for name, heads in named if name in wanted]

    def litgpt_adapts(self, name: str) -> bool:
        """Whether litgpt adapts a linear layer outside its fused projection, by the name of its weight."""
        place = {"output": "projection", "head": "head"}.get(name, "mlp")
        return self.litgpt and self.adapter == "lora" and place in self.targets

    @property
    def scales(self) -> bool:
        """Whether each linear layer has a bias and a scale that train, and norms train."""
        return self.adapter == "llama-adapter-v2"

    @property
    def prompts(self) -> bool:
        """Whether attention reads learned prompts as well, from the third layer on."""
        return self.adapter != "lora" and self.prompted

    @property
    def saves_embedding(self) -> bool:
        return any(name in EMBEDDING_MODULES for name in self.saved)

    @property
    def saves_head(self) -> bool:
        return any(name in HEAD_MODULES for name in self.saved)

    def takes(self, modules: tuple[str, ...], module: str) -> bool:
        """Whether the linear layer `module`, one of the layer's `modules`, gets an adapter."""
        if self.targets == ("all-linear",):
            return True
        return module in (self.targets or _peft_default(modules))


# peft's own targets by architecture (peft/utils/constants.py) come down to the first of these that the layer has.
_PEFT_TARGETS = (
    ("q_proj", "v_proj"),
    ("qkv_proj",),
    ("query_key_value",),
    ("c_attn",),
    ("Wqkv",),
    ("q_b_proj", "kv_b_proj"),
    ("q", "v"),
    ("query", "value"),
)


def _peft_default(modules: tuple[str, ...]) -> tuple[str, ...]:
    if {"q_proj", "dense", "fc1", "fc2"} <= set(modules):  # Phi 1 and 2
        return ("q_proj", "v_proj", "fc1", "fc2")
    return next((names for names in _PEFT_TARGETS if set(names) <= set(modules)), ())


def has_peft_targets(spec: ModelSpec) -> bool:
    """Whether any layer has linear layers that peft's own choice adapts."""
    kinds = (tuple(module for _, module in linear_modules(parts)) for parts in spec.layers.kind_parts)
    return any(map(_peft_default, kinds))


def linear_modules(parts: tuple[Part, ...]) -> dict[tuple[str, str], tuple[int, int]]:
    """(output, input) features of each nn.Linear by (part, module); the parts of a fused one add their outputs.

    Experts are held in one tensor, which is no nn.Linear.
    """
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for part in parts:
        for weight in part.weights if not part.expert else ():
            if weight.module and weight.matmul:
                output, inputs = (dimension.size for dimension in weight.shape)
                before = found.get((part.name, weight.module), (0, 0))[0]
                found[part.name, weight.module] = (before + output, inputs)
    return found


def _adapters(parts: tuple[Part, ...], lora: Lora) -> Iterator[Tensor]:
    modules = linear_modules(parts)
    names = tuple(module for _, module in modules)
    for (part, module), (output, inputs) in modules.items():
        if lora.takes(names, module):
            for name, first, rest in (("lora_A", lora.rank, inputs), ("lora_B", output, lora.rank)):
                latex = ("<r>", "<d_in>") if name == "lora_A" else ("<d_out>", "<r>")
                numbers = (
                    (("r", lora.rank), ("d_in", inputs)) if name == "lora_A" else (("r", lora.rank), ("d_out", output))
                )
                place = (part, "adapters", module, name)
                yield Tensor(place, 1, first, rest, *latex, numbers, "/".join(place), matrix=True, adapter=lora.width)
            if lora.magnitude:
                place = (part, "adapters", module, "lora_magnitude_vector")
                yield Tensor(
                    place, 1, output, 1, "<d_out>", "", (("d_out", output),), "/".join(place), adapter=lora.width
                )


def _litgpt_adapters(layer: Layer, lora: Lora) -> Iterator[Tensor]:
    """lora_A and lora_B of a layer's fused projection (litgpt/lora.py, LoRAQKVLinear), and of its other linear layers (LoRALinear)."""
    assert isinstance(layer.mixer, Attention)
    outputs = lora.litgpt_outputs(layer.mixer)
    rows = (("lora_A", lora.rank * len(outputs), layer.mixer.hidden_size), ("lora_B", sum(outputs), lora.rank))
    for name, first, rest in rows if outputs else ():
        place = ("attention", "adapters", "qkv", name)
        numbers = (("d_1", first), ("d_2", rest))
        yield Tensor(place, 1, first, rest, "<d_1>", "<d_2>", numbers, "/".join(place), matrix=True, adapter=lora.width)
    for part in layer.parts:
        for weight in part.weights:
            if weight.matmul and weight.name not in ("query", "key", "value"):
                yield from _pair(part.name, weight, lora)


def _pair(part: str, weight: Weight, lora: Lora) -> Iterator[Tensor]:
    """lora_A and lora_B next to one linear layer of litgpt's, if it is adapted."""
    output, inputs = (dimension.size for dimension in weight.shape)
    for name, first, rest in (("lora_A", lora.rank, inputs), ("lora_B", output, lora.rank)):
        if lora.litgpt_adapts("head" if part == "head" else weight.name):
            place = (part, "adapters", weight.name, name)
            numbers = (("d_1", first), ("d_2", rest))
            yield Tensor(
                place, 1, first, rest, "<d_1>", "<d_2>", numbers, "/".join(place), matrix=True, adapter=lora.width
            )


def _group(
    path: tuple[str, ...],
    layer: Layer | None,
    parts: tuple[Part, ...],
    tp: int,
    ep: int,
    lora: Lora | None = None,
    wide_router: bool = False,
    expert_tp: int | None = None,
) -> Tensors:
    found = [tensor for part in parts for tensor in _part(part, layer, tp, ep, expert_tp)]
    found = [replace(tensor, wide=True) if wide_router and tensor.path[0] == "router" else tensor for tensor in found]
    if lora and lora.quantised:
        found = _quantised(parts, found, lora.base)
    if lora and lora.litgpt:
        found += _litgpt_adapters(layer, lora) if layer else ()
        found = [*_scaled(found, lora)] if lora.scales else found
    elif lora:
        found += _adapters(parts, lora)
    return Tensors(path, tuple(found))


def _scaled(found: list[Tensor], lora: Lora) -> Iterator[Tensor]:
    """LLaMA-Adapter's second version: norms that train, and for each linear layer as many biases and scales as it has outputs."""
    for tensor in found:
        norm = "norm" in tensor.path[0]
        yield replace(tensor, adapter=lora.width) if norm else tensor
        if norm or tensor.rest == 1:
            continue
        for name in ("adapter_bias", "adapter_scale"):
            place = (tensor.path[0], "adapters", *tensor.path[1:], name)
            numbers = (("d_out", tensor.first),)
            yield Tensor(place, 1, tensor.first, 1, "<d_out>", "", numbers, "/".join(place), adapter=lora.width)


def _prompts(spec: ModelSpec, lora: Lora) -> Iterator[Tensor]:
    """LLaMA-Adapter's prompts and gates, of all layers that have some."""
    mixer, count = spec.layers.kinds[0].mixer, max(0, spec.num_hidden_layers - FIRST_ADAPTED)
    assert isinstance(mixer, Attention)
    for name, first, rest in (
        ("adapter_wte", PROMPT, spec.hidden_size),
        ("gating_factor", mixer.num_attention_heads, 1),
    ):
        place = ("adapters", name)
        numbers = (("d_1", first), ("d_2", rest))
        yield Tensor(place, count, first, rest, "<d_1>", "<d_2>", numbers, "/".join(place), adapter=lora.width)


def _quantised(parts: tuple[Part, ...], found: list[Tensor], base: BaseFormat) -> list[Tensor]:
    """The tensors with the weights of linear layers in the base format, as transformers loads them: no biases, experts and routers."""
    linear = {
        (part.name, weight.name)
        for part in parts
        for weight in part.weights
        if weight.module and weight.matmul and not part.expert and part.name != "router"
    }
    return [replace(tensor, quantised=base if tensor.path in linear else "") for tensor in found]


def _with_copies(group: Tensors, wanted: bool, first: bool = False) -> Tensors:
    """The group with copies of its weights that train; `first`: of its first alone, the token table."""
    if not wanted:
        return group
    kept = group.tensors[:1] if first else [tensor for tensor in group.tensors if tensor.path[0] == "head"]
    copies = (
        replace(tensor, path=(*tensor.path, "saved"), storage=f"{tensor.storage}/saved", saved=True) for tensor in kept
    )
    return Tensors(group.path, (*group.tensors, *copies))


@dataclass(frozen=True, eq=False)
class ModelTensors:
    """The tensors of a model on one rank of tp · ep: one group a layer kind, and what lies at the ends of the stack."""

    kinds: tuple[Tensors, ...]
    embedding: Tensors
    end: Tensors  # final norm, head, prediction-head transforms
    towers: tuple[tuple[Tensors, int], ...]
    tied_head: Tensors  # what the last pipeline stage holds again when the head is tied

    @cached_property
    def root(self) -> Tensors:
        """Both ends together, as FSDP2 shards them where one device holds both."""
        return Tensors((), (*self.embedding.tensors, *self.end.tensors))


def kind_path(stack: Stack, index: int) -> tuple[str, ...]:
    """`layers` where all are alike, else `layers/<kind>`, a kind's second appearance numbered."""
    if len(stack.kinds) == 1:
        return ("layers",)
    names = [kind.kind for kind in stack.kinds]
    again = names[: index + 1].count(names[index])
    return ("layers", f"{names[index]}_{again}" if again > 1 else names[index])


def _end(spec: ModelSpec, parts: tuple[Part, ...], tp: int, lora: Lora | None) -> Tensors:
    """Final norm and head; Lightning's bitsandbytes plugin, which litgpt uses, quantises the head too."""
    found = _group((), None, parts, tp, 1)
    if lora is None or not lora.litgpt:
        return found
    tensors = list(found.tensors)
    if lora.quantised:
        tensors = [replace(t, quantised=lora.base) if t.path[0] == "head" and t.rest > 1 else t for t in tensors]
    tensors = [*_scaled(tensors, lora)] if lora.scales else tensors
    tensors += [adapter for weight in spec.head if weight.matmul for adapter in _pair("head", weight, lora)]
    return Tensors(found.path, (*tensors, *(_prompts(spec, lora) if lora.prompts else ())))


@lru_cache(maxsize=256)
def model_tensors(
    spec: ModelSpec, tp: int, ep: int, lora: Lora | None = None, whole_experts: bool = False
) -> ModelTensors:
    """Every tensor of the model on one rank. `whole_experts`: tp · ep ranks share them. Cached: a spec hashes by identity."""
    stack, wide = spec.layers, model_class(spec.architecture).fp32_router
    ep, expert_tp = (ep * tp, 1) if whole_experts else (ep, tp)
    kinds = tuple(
        _group(kind_path(stack, index), kind, stack.kind_parts[index], tp, ep, lora, wide, expert_tp)
        for index, kind in enumerate(stack.kinds)
    )
    end = [Part("final_norm", spec.final_norm.weights)] if spec.final_norm else []
    end += [Part("head", spec.head)] if spec.head else []
    end += list(spec.other)
    token = Part("head", spec.embeddings[:1] if spec.tied and spec.has_head else ())
    embedding = _group((), None, (Part("embedding", spec.embeddings),), tp, 1)
    return ModelTensors(
        kinds,
        _with_copies(embedding, lora is not None and lora.saves_embedding, first=True),
        _with_copies(_end(spec, tuple(end), tp, lora), lora is not None and lora.saves_head),
        tuple(_towers(spec, tp)),
        _group((), None, (token,), tp, 1),
    )


# Towers that a step on text does not run. (A model of pictures and text alone, such as CLIP, runs its own.)
_IDLE_TOWERS = ("vision", "audio", "picture_layers")


def idle_towers(spec: ModelSpec) -> tuple[str, ...]:
    """The towers whose weights a step on text leaves without gradients."""
    found = (tower.name for tower in spec.towers if tower.in_total and tower.name in _IDLE_TOWERS)
    return tuple(found) if spec.has_head else ()


def _idle(group: Tensors) -> Tensors:
    return Tensors(group.path, tuple(replace(tensor, frozen=True) for tensor in group.tensors))


def _towers(spec: ModelSpec, tp: int) -> Iterator[tuple[Tensors, int]]:
    idle = idle_towers(spec)
    for group, count in _all_towers(spec, tp):
        yield (_idle(group) if group.path[0] in idle else group), count


def _all_towers(spec: ModelSpec, tp: int) -> Iterator[tuple[Tensors, int]]:
    """An encoder of text is divided as its decoder is (Megatron-LM's T5). Other towers are copied on every tensor-parallel rank:
    no plan of theirs is known."""
    for tower in spec.towers:
        if not tower.in_total:
            continue
        ranks = tp if tower.name == "encoder" else 1
        if tower.parts:
            yield _group((tower.name,), None, tower.parts, ranks, 1), 1
        for index, count in enumerate(tower.stack.counts):
            path = (tower.name, *kind_path(tower.stack, index))
            yield _group(path, tower.stack.kinds[index], tower.stack.kind_parts[index], ranks, 1), count
