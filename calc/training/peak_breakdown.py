"""What is alive at the highest point of a stage's step, as the parts of a breakdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from calc.breakdown import Component, Formula
from calc.pipeline import weight_versions
from calc.training.autograd.segments import Segment
from calc.training.deepspeed.engine import URL as ENGINE_URL
from calc.training.stage_memory import StageMemory
from calc.training.stage_shape import END, Moment
from calc.training.states.recipes import OPTIMIZERS
from calc.training.states.sharding import GROUPS, merged, placed, state_components
from calc.training.states.stage_tensors import model_of
from calc.training.states.tensors import Tensors

_BUCKETS = (
    "PyTorch 2.13, DistributedDataParallel (gradient_as_bucket_view=False): g, the bytes of all gradients",
    "https://docs.pytorch.org/docs/2.13/generated/torch.nn.parallel.DistributedDataParallel.html",
)
_PARTITION = ("DeepSpeed 0.12.6, stage_1_and_2.py, grads_in_partition: of the micro-batch that runs", ENGINE_URL)
IN_FLIGHT = "k: kept by one micro-batch, c: chunks in flight, v: chunks of this rank (PyTorch and Megatron-LM pipeline schedules)"
PIPELINE_URL = "https://arxiv.org/abs/2104.04473"


def _plain(name: str, value: int, latex: str, numbers: dict[str, int], source: str, url: str = "") -> Component:
    return Component(name, value, formula=Formula(latex, source, url), numbers=numbers)


def components(memory: StageMemory) -> tuple[Component, ...]:
    """What is alive at the highest point of the step; the leaves sum to its bytes."""
    phase, moment = memory.peak
    parts = {name for name, size in memory.live_parts(phase, moment) if size}
    kept = [name for name in GROUPS if name in parts]
    made = list(state_components(memory.groups, memory.key, tuple(kept)))
    for name, leaves in _AFTER_STATES.items():
        made += leaves(memory, phase, moment) if name in parts else ()
    activations = [leaf for name, leaves in _KEPT.items() if name in parts for leaf in leaves(memory, phase, moment)]
    made.append(Component("activations", children=merged(activations)))
    for name, leaves in _PASSING.items():
        made += leaves(memory, phase, moment) if name in parts else ()
    return tuple(part for part in made if part.children or part.value)


Leaves = Callable[[StageMemory, str, Moment], Iterable[Component]]


def _older(memory: StageMemory, phase: str, moment: Moment) -> Iterable[Component]:
    versions = weight_versions(memory.plan.schedule, memory.plan.pp)[memory.stage.rank]
    numbers = {"n": versions, "w": memory.older_weights // (versions - 1)}
    source = "PipeDream, arXiv 1806.03377, section 3.3"
    yield _plain("older_weights", memory.older_weights, r"(<n> - 1) \cdot <w>", numbers, source)


def _buckets(memory: StageMemory, phase: str, moment: Moment) -> Iterable[Component]:
    yield _plain("ddp_buckets", memory.ddp_buckets, "<g>", {"g": memory.ddp_buckets}, *_BUCKETS)


def _later_gradients(memory: StageMemory, phase: str, moment: Moment) -> Iterable[Component]:
    """The gradients that the segments after this one have left."""
    shape, counts = memory.shape, dict[int, tuple[Tensors, int]]()
    index = moment.segment
    for segment in memory.segments[index + 1 : index + 2 if shape.streams else None]:
        if shape.waits_gathered(segment):
            continue
        found = [segment.tensors]
        if segment.path == END and memory.spec.tied:
            found.append(model_of(memory.plan, memory.spec).tied_head)
        for tensors in found:
            counts[id(tensors)] = (tensors, counts.get(id(tensors), (tensors, 0))[1] + 1)
    return state_components(tuple(counts.values()), memory.key, ("gradients",))


def _partition(memory: StageMemory, phase: str, moment: Moment) -> Iterable[Component]:
    size = memory.shape.partition
    yield _plain("gradient_partition", size, "<x>", {"x": size}, *_PARTITION)


def _constants(memory: StageMemory, phase: str, moment: Moment) -> Iterable[Component]:
    return (constant.leaf for constant in memory.shape.constants_alive(phase, moment.segment))


def _received(memory: StageMemory, phase: str, moment: Moment) -> Iterable[Component]:
    size = memory.shape.received
    yield _plain("received", size, "<x>", {"x": size}, "the stage before sends its output")


def _segments(memory: StageMemory, phase: str, moment: Moment) -> Iterable[Component]:
    """What the segments before this one keep."""
    counts: dict[int, tuple[Segment, int]] = {}
    for segment in memory.segments[: max(moment.segment, 0)]:
        counts[id(segment)] = (segment, counts.get(id(segment), (segment, 0))[1] + 1)
    for segment, count in counts.values():
        kept = segment.kept(phase == "forward") if memory.shape.kept_of(segment) else ()
        if kept:
            yield from placed(segment.path, kept, count) if segment.path != END else kept


def _in_flight(memory: StageMemory, phase: str, moment: Moment) -> Iterable[Component]:
    numbers = {"k": memory.shape.kept_waiting, "c": memory.stage.chunks, "v": memory.stage.virtual}
    latex = r"\lceil \frac{<k> \cdot <c>}{<v>} \rceil - <k>"
    yield _plain("in_flight", memory.waiting, latex, numbers, IN_FLIGHT, PIPELINE_URL)


def _gathered(memory: StageMemory, phase: str, moment: Moment) -> Iterable[Component]:
    yield Component("gathered", children=memory.full_weights.leaves(phase, moment.segment, moment.at))


def _working(memory: StageMemory, phase: str, moment: Moment) -> Iterable[Component]:
    """What the segment itself holds at that moment."""
    segment = memory.segments[moment.segment]
    if moment.at == "block":
        parts = segment.live_parts(phase, memory.shape.adds_at_once)
    else:
        storages = memory.shape.around(phase, segment, moment.at).items()
        source = "what the block begins or ends with"
        parts = tuple(_plain(name, value, "<x>", {"x": value}, source) for name, value in storages if value)
    yield Component("working", children=placed(segment.path, parts, 1) if parts else ())


def _pass(memory: StageMemory, phase: str, moment: Moment) -> Iterable[Component]:
    yield Component("working", children=memory.shape.pass_of(phase).live_parts(phase, False))


def _optimizer_step(memory: StageMemory, phase: str, moment: Moment) -> list[Component]:
    ledger, kernel = OPTIMIZERS[memory.plan.optimizer], memory.plan.optimizer_kernel
    if memory.step.matrix == memory.step_bytes:
        source = f"{ledger.source}: m, the update of one matrix, its iterates and products"
        return [_plain("optimizer_step", memory.step_bytes, "<m>", {"m": memory.step_bytes}, source, ledger.url)]
    ledger = OPTIMIZERS["adamw"] if ledger.vectors_adamw else ledger
    copies = ledger.foreach if kernel == "foreach" else 1
    numbers = {"m": memory.step_bytes // copies}
    source = f"{ledger.source}, {'foreach' if kernel == 'foreach' else 'one tensor at a time'}"
    return [_plain("optimizer_step", memory.step_bytes, rf"{copies} \cdot <m>", numbers, source, ledger.url)]


# the parts of `StageMemory.live_parts` as leaves, in the order of the tree: after the states, kept from forward to backward, passing
_AFTER_STATES: Final[dict[str, Leaves]] = {
    "older_weights": _older,
    "ddp_buckets": _buckets,
    "later_gradients": _later_gradients,
    "gradient_partition": _partition,
}
_KEPT: Final[dict[str, Leaves]] = {
    "constants": _constants,
    "received": _received,
    "segments": _segments,
    "in_flight": _in_flight,
}
_PASSING: Final[dict[str, Leaves]] = {
    "gathered": _gathered,
    "working": _working,
    "pass": _pass,
    "optimizer_step": _optimizer_step,
}
