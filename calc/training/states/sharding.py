"""Bytes of the training states that one device holds: parameters, gradients, optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from calc.breakdown import Component, Formula, Number
from calc.training.plan import TrainingPlan
from calc.training.states.base_formats import BASE_FORMATS
from calc.training.states.recipes import OPTIMIZERS, RECIPES
from calc.training.states.tensors import Tensor, Tensors
from calc.units import ceil_div, round_up

GRANULE = 512  # bytes; PyTorch's caching allocator rounds every storage up (kMinBlockSize in CUDACachingAllocator)
GROUPS = ("parameters", "gradients", "optimizer")
ALLOCATOR = Formula(
    "<r> - <x>",
    "PyTorch 2.13, c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize",
    "https://github.com/pytorch/pytorch/blob/v2.13.0/c10/cuda/CUDACachingAllocator.cpp",
    ("r: the storages rounded up to 512 bytes each; x: their exact bytes",),
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One state of the ledger as it lies on a device: bytes for each element, and how the ranks divide it.

    `kind`: "plain" bytes an element, "blocks" 8 bits with a scale a block, "factored" a row and a column. `only`: "vector"
    for states that hidden matrices do not have. `per`: so many elements share the bytes.
    """

    name: str
    group: str
    bytes: int
    zero: int
    source: str
    url: str
    kind: str = "plain"
    only: str = ""
    per: int = 1


_NEVER = 4  # a ZeRO stage that there is not: the state lies whole on every rank
_BASES = {
    name: tuple(
        Rule(row.name, "parameters", row.bytes, 3 if row.sharded else _NEVER, ledger.source, ledger.url, per=row.per)
        for row in ledger.stored
    )
    for name, ledger in BASE_FORMATS.items()
}


@cache
def rules(recipe: str, optimizer: str) -> tuple[Rule, ...]:
    """The states that a recipe and an optimizer keep for each trained parameter."""
    ledger, steps = RECIPES[recipe], OPTIMIZERS[optimizer]
    found = [Rule(s.name, s.group, s.bytes, s.zero, ledger.source, ledger.url) for s in ledger.states]
    kind = "blocks" if steps.block else "factored" if steps.factored else "plain"
    size = steps.moment or ledger.moment
    found += [Rule(name, "optimizer", size, 1, steps.source, steps.url, kind) for name in steps.moments]
    if steps.vectors_adamw:  # what is no hidden matrix keeps AdamW's two moments
        found.append(Rule("moment_2", "optimizer", ledger.moment, 1, steps.source, steps.url, only="vector"))
    return tuple(found)


class StateKey(NamedTuple):
    """What the states of a plan depend on, and nothing else: the key of their cache.

    ZeRO divides over `shards` ranks, experts over `expert_shards`; `rows`: by whole rows of the first dimension (FSDP2).
    """

    recipe: str
    optimizer: str
    frozen: bool  # LoRA: only adapters train
    zero: int
    shards: int
    expert_shards: int
    rows: bool
    granule: int
    counters: bool = False  # a step counter on the device for each tensor, as fused kernels keep it
    engine: bool = False  # DeepSpeed's: flat shards, adapters in the recipe's formats
    apart: bool = False  # no two projections lie in one tensor (torchtitan)
    experts_inside: bool = (
        False  # where ranks are more than experts, each expert's rows are divided (torchtitan's expert parallelism)
    )

    @classmethod
    def of(cls, plan: TrainingPlan) -> StateKey:
        program = plan.transformers or plan.implementation == "torchtitan"
        engine = plan.implementation == "deepspeed"
        return cls(
            plan.recipe, plan.optimizer, plan.lora is not None, plan.zero, plan.shards, plan.expert_shards,
            rows=plan.zero == 3 and program and not engine and plan.shards > 1,
            granule=GRANULE if program and not engine else 1,
            engine=engine,
            counters=program and not engine and plan.optimizer_kernel == "fused" and OPTIMIZERS[plan.optimizer].counts_on_device,
            apart=plan.implementation == "torchtitan",
            experts_inside=plan.implementation == "torchtitan" and plan.expert_ranks > 1,
        )  # fmt: skip

    def storage(self, tensor: Tensor) -> str:
        """What holds the tensor's numbers; tensors of one name share it."""
        return "/".join(tensor.path) if self.apart else tensor.storage

    def rules(self, tensor: Tensor) -> tuple[Rule, ...]:
        """The states of this tensor. What LoRA freezes, or no text reaches, has its weight alone."""
        if tensor.adapter and self.engine:
            return rules(self.recipe, self.optimizer)
        if tensor.adapter:
            return rules("fp32" if tensor.adapter == 4 else "pure-bf16", self.optimizer)
        if tensor.quantised:
            return _BASES[tensor.quantised]
        if tensor.saved:
            return rules(self.recipe, self.optimizer)
        fp32 = tensor.wide and self.recipe == "pure-bf16" and self.granule > 1
        found = rules("fp32" if fp32 else self.recipe, self.optimizer)
        return tuple(rule for rule in found if rule.group == "parameters") if self.frozen or tensor.frozen else found

    def ranks(self, tensor: Tensor, rule: Rule) -> int:
        """Over how many ranks this state of the tensor is divided."""
        if self.zero < rule.zero:
            return 1
        return self.expert_shards if tensor.expert else self.shards

    def elements(self, tensor: Tensor, ranks: int) -> int:
        """Elements of the tensor on one of so many ranks."""
        if ranks == 1:
            return tensor.elements
        if not self.rows:
            return ceil_div(tensor.elements, ranks)
        if tensor.expert and self.experts_inside and ranks > tensor.copies:
            return tensor.copies * ceil_div(tensor.first, ranks) * tensor.rest
        if tensor.expert:  # all experts lie in one tensor, whose first dimension is the expert
            return ceil_div(tensor.copies, ranks) * tensor.first * tensor.rest
        return ceil_div(tensor.first, ranks) * tensor.rest

    def bytes(self, tensor: Tensor, rule: Rule) -> int:
        """Exact bytes of one state of one tensor on one device, before the allocator rounds."""
        if rule.only and tensor.matrix:
            return 0
        ranks = self.ranks(tensor, rule)
        if rule.kind == "factored" and tensor.rest > 1:
            return rule.bytes * tensor.copies * ceil_div(tensor.first + tensor.rest, ranks)
        elements = self.elements(tensor, ranks)
        if rule.kind == "blocks":
            ledger = OPTIMIZERS[self.optimizer]
            if not ledger.takes(tensor.elements):
                return (ledger.small or rule.bytes) * elements
            return ceil_div(ledger.bits * elements, 8) + 4 * ceil_div(elements, ledger.block) + ledger.table
        return rule.bytes * ceil_div(elements, rule.per)


class GroupBytes(NamedTuple):
    """Bytes of a group of tensors on one device, storages rounded up; `exact` before that."""

    parameters: int
    gradients: int
    optimizer: int
    exact: tuple[int, ...]

    @property
    def rounded(self) -> tuple[int, int, int]:
        """Parameters, gradients, optimizer."""
        return self.parameters, self.gradients, self.optimizer


@lru_cache(maxsize=4096)
def group_bytes(tensors: Tensors, key: StateKey) -> GroupBytes:
    """The states of a group of tensors. Cached: a group hashes by identity."""
    stored: dict[tuple[str, str, str], int] = {}
    for tensor in tensors.tensors:
        for rule in key.rules(tensor):
            together = key.rows and rule.group == "gradients"  # FSDP2's reduce-scatter gives a group's in one buffer
            place = (rule.group, rule.name, "" if together else key.storage(tensor))
            stored[place] = stored.get(place, 0) + key.bytes(tensor, rule)
    if key.counters:
        trained = {
            key.storage(tensor)
            for tensor in tensors.tensors
            if any(rule.group == "gradients" for rule in key.rules(tensor))
        }
        stored |= {("optimizer", "step", storage): 4 for storage in trained}
    for storage, base in {tensor.storage: tensor.quantised for tensor in tensors.tensors if tensor.quantised}.items():
        stored |= {("parameters", name, storage): size for name, size in BASE_FORMATS[base].tables}
    exact, rounded = dict.fromkeys(GROUPS, 0), dict.fromkeys(GROUPS, 0)
    for (group, _, _), size in stored.items():
        up = round_up(size, key.granule)
        exact[group] += size
        rounded[group] += up
    parameters, gradients, optimizer = (rounded[group] for group in GROUPS)
    return GroupBytes(parameters, gradients, optimizer, tuple(exact[group] for group in GROUPS))


def leaf(key: StateKey, tensor: Tensor, rule: Rule, name: str) -> Component:
    """One state of one tensor, with its formula."""
    ranks, numbers = key.ranks(tensor, rule), dict(tensor.numbers)
    latex = _elements_latex(key, tensor, rule, ranks, numbers)
    assumes = ("n_z: ranks that ZeRO shards over" + (", whole rows each, padded (FSDP2)" if key.rows else ", evenly"),)
    formula = Formula(latex, rule.source, rule.url, assumes if ranks > 1 else ())
    return Component(name, key.bytes(tensor, rule), formula=formula, numbers=numbers)


def _elements_latex(key: StateKey, tensor: Tensor, rule: Rule, ranks: int, numbers: dict[str, Number]) -> str:
    copies = ""
    if tensor.copies > 1:
        numbers["E"] = tensor.copies
        copies = r"<E> \cdot "
    if ranks > 1:
        numbers["n_z"] = ranks
    first, rest = tensor.first_latex, rf" \cdot {tensor.rest_latex}" if tensor.rest_latex else ""
    whole = f"{copies}{first}{rest}"
    if rule.kind == "factored" and tensor.rest > 1:
        both = f"{first} + {tensor.rest_latex}"
        each = rf"\lceil \frac{{{both}}}{{<n_z>}} \rceil" if ranks > 1 else f"({both})"
        return rf"{rule.bytes} \cdot {copies}{each}"
    inside = key.experts_inside and ranks > tensor.copies
    if ranks > 1 and key.rows and tensor.expert and inside:
        whole = rf"{tensor.copies} \cdot \lceil \frac{{{first}}}{{<n_z>}} \rceil{rest}"
    elif ranks > 1 and key.rows and tensor.expert:
        whole = rf"\lceil \frac{{{tensor.copies}}}{{<n_z>}} \rceil \cdot {first}{rest}"
    elif ranks > 1 and key.rows:
        whole = rf"\lceil \frac{{{first}}}{{<n_z>}} \rceil{rest}"
    elif ranks > 1:
        whole = rf"\lceil \frac{{{whole}}}{{<n_z>}} \rceil"
    if rule.kind == "blocks":
        ledger = OPTIMIZERS[key.optimizer]
        if not ledger.takes(tensor.elements):
            return rf"{ledger.small or rule.bytes} \cdot {whole}"
        codes = whole if ledger.bits == 8 else rf"\lceil \frac{{{ledger.bits} \cdot {whole}}}{{8}} \rceil"
        table = f" + {ledger.table}" if ledger.table else ""
        return rf"{codes} + 4 \cdot \lceil \frac{{{whole}}}{{{ledger.block}}} \rceil" + table
    if rule.per > 1:
        return rf"{rule.bytes} \cdot \lceil \frac{{{whole}}}{{{rule.per}}} \rceil"
    return rf"{rule.bytes} \cdot {whole}"


Placed = tuple[Tensors, int]  # a group, and how many of it the device holds


def state_components(
    groups: tuple[Placed, ...], key: StateKey, names: tuple[str, ...] = GROUPS
) -> tuple[Component, ...]:
    """`parameters`, `gradients` and `optimizer` as trees: the place of each tensor, and below it its states."""
    return tuple(part for name in names if (part := _group(name, groups, key)).children)


def _group(group: str, groups: tuple[Placed, ...], key: StateKey) -> Component:
    at = GROUPS.index(group)
    children: list[Component] = []
    exact = rounded = 0
    for tensors, count in groups:
        leaves = [found for found in _leaves(tensors, group, key) if found[1].value]
        if count and leaves:
            children += placed(tensors.path, tree(leaves), count)
        sizes = group_bytes(tensors, key)
        exact += count * sizes.exact[at]
        rounded += count * sizes.rounded[at]
    named = sum(int(child.total) for child in children)
    if exact > named:  # what belongs to whole storages, not to their parts
        name, each, source, url = (
            _tables(groups)
            if group == "parameters"
            else ("step_counters", 4, OPTIMIZERS[key.optimizer].source, OPTIMIZERS[key.optimizer].url)
        )
        formula = Formula(rf"{each} \cdot <tensors>", source, url)
        children.append(Component(name, exact - named, formula=formula, numbers={"tensors": (exact - named) // each}))
    if rounded > exact:
        numbers = {"r": rounded, "x": exact}
        children.append(Component("rounding", rounded - exact, formula=ALLOCATOR, numbers=numbers))
    return Component(group, children=merged(children))


def _tables(groups: tuple[Placed, ...]) -> tuple[str, int, str, str]:
    """The tables next to each quantised weight: their name, bytes and source."""
    base = next(tensor.quantised for tensors, _ in groups for tensor in tensors.tensors if tensor.quantised)
    ledger = BASE_FORMATS[base]
    name = f"{base.partition('-')[0]}_tables"
    return name, sum(size for _, size in ledger.tables), ledger.source, ledger.url


Leaf = tuple[tuple[str, ...], Component]


def _leaves(tensors: Tensors, group: str, key: StateKey) -> Iterator[Leaf]:
    for tensor in tensors.tensors:
        found = [rule for rule in key.rules(tensor) if rule.group == group]
        several = sum(rule.group == group for rule in rules(key.recipe, key.optimizer)) > 1 or len(found) > 1
        for rule in found:
            path = (*tensor.path, rule.name) if several else tensor.path
            yield path, leaf(key, tensor, rule, path[-1])


def tree(leaves: Iterable[Leaf]) -> tuple[Component, ...]:
    """Leaves whose paths begin alike under one node, recursively."""
    nodes: dict[str, list[Leaf]] = {}
    for path, found in leaves:
        nodes.setdefault(path[0], []).append((path[1:], found))
    return tuple(
        below[0][1] if below[0][0] == () else Component(name, children=tree(below)) for name, below in nodes.items()
    )


def placed(path: tuple[str, ...], parts: tuple[Component, ...], count: int) -> tuple[Component, ...]:
    """The parts under the nodes of `path`, whose last stands for `count` copies."""
    if not path:
        return parts
    node = Component(path[-1], children=parts, count=count)
    for name in reversed(path[:-1]):
        node = Component(name, children=(node,))
    return (node,)


def merged(parts: Iterable[Component]) -> tuple[Component, ...]:
    """Nodes of one name and count 1 (layers of several kinds) as one node, in the order of their first appearance."""
    found: dict[str, Component] = {}
    for part in parts:
        known = found.get(part.name)
        assert known is None or known.count == part.count == 1, part.name
        children = part.children if known is None else (*known.children, *part.children)
        found[part.name] = part if known is None else Component(part.name, children=merged(children))
    return tuple(found.values())
