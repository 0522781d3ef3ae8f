"""What is alive at the highest point of a stage's step, as the parts of a breakdown."""

from __future__ import annotations

from calc.breakdown import Component, Formula
from calc.pipeline import weight_versions
from calc.training.autograd.segments import Segment
from calc.training.stage_memory import EMBEDDING, END, Moment, StageMemory
from calc.training.states.offload import resident
from calc.training.states.recipes import OPTIMIZERS
from calc.training.states.sharding import Placed, merged, placed, state_components
from calc.training.states.stage_tensors import model_of
from calc.training.states.tensors import Tensors

_BUCKETS = (
    "PyTorch 2.13, DistributedDataParallel (gradient_as_bucket_view=False): g, the bytes of all gradients",
    "https://docs.pytorch.org/docs/2.13/generated/torch.nn.parallel.DistributedDataParallel.html",
)
IN_FLIGHT = "k: kept by one micro-batch, c: chunks in flight, v: chunks of this rank (PyTorch and Megatron-LM pipeline schedules)"
PIPELINE_URL = "https://arxiv.org/abs/2104.04473"


def _plain(name: str, value: int, latex: str, numbers: dict[str, int], source: str, url: str = "") -> Component:
    return Component(name, value, formula=Formula(latex, source, url), numbers=numbers)


def components(memory: StageMemory) -> tuple[Component, ...]:
    """What is alive at the highest point of the step; the leaves sum to its bytes."""
    phase, moment = memory.peak
    made = list(state_components(memory.groups, memory.key, resident(memory.plan)))
    if memory.older_weights:
        made.append(_older(memory))
    if memory.ddp_buckets:
        made.append(_plain("ddp_buckets", memory.ddp_buckets, "<g>", {"g": memory.ddp_buckets}, *_BUCKETS))
    first = next((found for found in memory.passes if found.path[0] == phase), None)
    if phase == "step" or first:
        until = ("step",) if first else ("step", "end")
        made.append(Component("activations", children=tuple(c.leaf for c in memory.constants if c.until in until)))
        made += [Component("working", children=first.alive(phase, False))] if first else _step(memory)
        return tuple(
            part for part in made if (part.children or part.value) and not (first and part.name == "gradients")
        )
    if not memory.accumulates:
        made = [part for part in made if part.name != "gradients"]
    index = moment.segment
    if phase == "backward" and not memory.accumulates:
        made += state_components(_later(memory, index), memory.key, ("gradients",))
    made.append(Component("activations", children=_kept(memory, index, phase)))
    if index >= 0:
        made.append(Component("gathered", children=memory.gathered.leaves(phase, index, moment.at)))
        made.append(_working(memory, phase, moment))
    return tuple(part for part in made if part.children or part.value)


def _working(memory: StageMemory, phase: str, moment: Moment) -> Component:
    """What the segment itself holds at that moment."""
    segment = memory.segments[moment.segment]
    if moment.at == "block":
        alive = segment.alive(phase, memory.adds_at_once)
    else:
        held = memory.around(phase, moment.segment, moment.at).items()
        source = "what the block begins or ends with"
        alive = tuple(_plain(name, value, "<x>", {"x": value}, source) for name, value in held if value)
    return Component("working", children=placed(segment.path, alive, 1) if alive else ())


def _later(memory: StageMemory, index: int) -> tuple[Placed, ...]:
    counts: dict[int, tuple[Tensors, int]] = {}
    for segment in memory.segments[index + 1 : index + 2 if memory.streams else None]:
        if memory.waits_gathered(segment):
            continue
        found = [segment.tensors]
        if segment.path == END and memory.spec.tied:
            found.append(model_of(memory.plan, memory.spec).tied_head)
        for tensors in found:
            counts[id(tensors)] = (tensors, counts.get(id(tensors), (tensors, 0))[1] + 1)
    return tuple(counts.values())


def _kept(memory: StageMemory, index: int, phase: str) -> tuple[Component, ...]:
    """What is kept beside the states while the segment of that index runs, by the segments before it and the rest."""
    freed = phase == "backward" and index >= 0 and memory.segments[index].path == EMBEDDING
    gone = {"end", "layers" if freed else "", "backward" if phase == "forward" or index < 0 else ""}
    if phase == "backward" or index < 0 or not memory.segments[index].inside:
        gone.add("stack")
    there = [constant for constant in memory.constants if not (constant.late and phase == "forward" and index >= 0)]
    made = [constant.leaf for constant in there if constant.until not in gone]
    if memory.received and not (index == 0 and phase == "forward"):
        made.append(
            _plain("received", memory.received, "<x>", {"x": memory.received}, "the stage before sends its output")
        )
    counts: dict[int, tuple[Segment, int]] = {}
    for segment in memory.segments[: max(index, 0)]:
        counts[id(segment)] = (segment, counts.get(id(segment), (segment, 0))[1] + 1)
    for segment, count in counts.values():
        kept = segment.kept(phase == "forward")
        if kept:
            made += placed(segment.path, kept, count) if segment.path != END else kept
    if memory.waiting:
        numbers = {"k": memory.kept_once, "c": memory.stage.chunks, "v": memory.stage.virtual}
        made.append(
            _plain(
                "in_flight",
                memory.waiting,
                r"\lceil \frac{<k> \cdot <c>}{<v>} \rceil - <k>",
                numbers,
                IN_FLIGHT,
                PIPELINE_URL,
            )
        )
    return merged(made)


def _older(memory: StageMemory) -> Component:
    versions = weight_versions(memory.plan.schedule, memory.plan.pp)[memory.stage.rank]
    weights = memory.older_weights // (versions - 1)
    numbers = {"n": versions, "w": weights}
    return _plain(
        "older_weights",
        memory.older_weights,
        r"(<n> - 1) \cdot <w>",
        numbers,
        "PipeDream, arXiv 1806.03377, section 3.3",
    )


def _step(memory: StageMemory) -> list[Component]:
    if not memory.step_bytes:
        return []
    ledger, kernel = OPTIMIZERS[memory.plan.optimizer], memory.plan.optimizer_kernel
    if memory.step.matrix == memory.step_bytes:
        source = f"{ledger.source}: m, the update of one matrix, its iterates and products"
        return [_plain("optimizer_step", memory.step_bytes, "<m>", {"m": memory.step_bytes}, source, ledger.url)]
    ledger = OPTIMIZERS["adamw"] if ledger.vectors_adamw else ledger
    copies = ledger.foreach if kernel == "foreach" else 1
    numbers = {"m": memory.step_bytes // copies}
    source = f"{ledger.source}, {'foreach' if kernel == 'foreach' else 'one tensor at a time'}"
    return [_plain("optimizer_step", memory.step_bytes, rf"{copies} \cdot <m>", numbers, source, ledger.url)]
