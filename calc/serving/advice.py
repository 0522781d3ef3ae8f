"""What helps to go on from an answer of `serve`: how far context and users go, which and how many GPUs it takes, and what to change
where it does not fit, each with what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calc.breakdown import Breakdown
from calc.commands import flag, word
from calc.errors import InputError
from calc.hardware import Gpu, gpus
from calc.model.spec import ModelSpec
from calc.serving.answer import ServingAnswer, capacity_of, serve
from calc.serving.capacity import Capacity
from calc.serving.plan import MOST_TOKENS, ServingPlan
from calc.units import show_bytes

_MOST_USERS = 100_000
_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_WEIGHTS = {
    "vllm": ("fp8", "awq-int4", "nvfp4"),
    "sglang": ("fp8", "awq-int4", "nvfp4"),
    "tensorrt-llm": ("fp8", "awq-int4", "nvfp4"),
    "mlx": ("mlx-int8", "mlx-int4"),
    "llama.cpp": ("gguf-Q8_0", "gguf-Q6_K", "gguf-Q4_K_M", "gguf-Q3_K_M"),
    "transformers": ("int8", "nf4"),
    "logical": ("fp8", "int8", "awq-int4", "nf4"),
}
_CACHE = {
    "vllm": ("fp8",),
    "sglang": ("fp8",),
    "tensorrt-llm": ("fp8",),
    "llama.cpp": ("q8_0", "q4_0"),
    "mlx": ("int8", "int4"),
}


@dataclass(frozen=True, slots=True)
class ServingChange:
    """One change that makes the plan fit: the plan's fields (or the GPU) with their new values, bytes a GPU, and what it costs."""

    values: Mapping[str, object]
    needed: int
    saved: int
    cost: str

    def as_json(self) -> dict[str, Any]:
        flags = " ".join(f"{flag(name)} {word(value)}" for name, value in self.values.items())
        return {
            "flags": flags,
            "values": dict(self.values),
            "driver_bytes": self.needed,
            "saved_bytes": self.saved,
            "costs": [{"quantity": "", "ratio": None, "text": self.cost}],
        }


@dataclass(frozen=True, eq=False)
class ServingSuggestions:
    """`longest_context` and `most_users` are 0 when not even one fits, None when the memory is unknown or nothing grows; the reasons say
    why the next one fails. `gpus_needed` is the fewest of this GPU by tensor parallelism, `smallest_gpu` the least memory of the
    catalogue that does at this layout; None when none does. `fixes` is empty when the plan fits."""

    answer: ServingAnswer
    longest_context: int | None
    most_users: int | None
    reasons: tuple[str, ...]
    gpus_needed: int | None
    smallest_gpu: str | None
    fixes: tuple[ServingChange, ...]

    @property
    def breakdown(self) -> Breakdown:
        """That of the answer."""
        return self.answer.breakdown

    def as_json(self) -> dict[str, Any]:
        """The keys of `python -m calc serve`, and those that `--suggest` adds."""
        found = self.answer.as_json()
        return {
            **found,
            "longest_context": self.longest_context,
            "most_users": self.most_users,
            "gpus_needed": self.gpus_needed,
            "smallest_gpu": self.smallest_gpu,
            "fixes": [change.as_json() for change in self.fixes],
            "notes": [*found["notes"], *self.reasons],
        }


def serve_and_suggest(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None = None) -> ServingSuggestions:
    """`serve` and what helps to go on, as one question of the command line."""
    return suggest(serve(spec, plan, gpu))


def suggest(answer: ServingAnswer) -> ServingSuggestions:
    """What helps to go on from an answer."""
    spec, plan, gpu = answer.spec, answer.plan, answer.gpu
    known = answer.capacity.limit is not None and answer.capacity.fits is not None
    context = _largest(spec, plan, gpu, "context", _most_context(spec)) if known and answer.kv_bytes_per_token else None
    users = _largest(spec, plan, gpu, "concurrency", _MOST_USERS) if known and answer.kv_bytes_per_sequence else None
    reasons = []
    if context:
        reasons.append(_reason(spec, plan, gpu, "context", context, "tokens"))
    if users:
        reasons.append(_reason(spec, plan, gpu, "concurrency", users, "concurrent requests"))
    fixes = tuple(_fixes(spec, plan, gpu, answer.capacity)) if known and not answer.capacity.fits else ()
    return ServingSuggestions(
        answer,
        context,
        users,
        tuple(reasons),
        _gpus_needed(spec, plan, gpu) if known else None,
        _smallest_gpu(spec, plan),
        fixes,
    )


def _most_context(spec: ModelSpec) -> int:
    return spec.max_position_embeddings or MOST_TOKENS


def _fits(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, **values: object) -> Capacity | None:
    """The capacity with these values when the plan fits, else None; a plan that its rules refuse does not fit."""
    try:
        capacity = capacity_of(spec, ServingPlan.model_validate(plan.model_dump(exclude_unset=True) | values), gpu)
    except (InputError, ValueError):
        return None
    return capacity if capacity.fits else None


def _largest(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, field: str, most: int) -> int:
    """The largest value of a field that fits, by halving; 0 when 1 does not."""

    def fits(value: int) -> bool:
        short = (
            {"prompt": None, "output": None}
            if field == "context" and value < plan.prompt_tokens + plan.output_tokens
            else {}
        )
        return _fits(spec, plan, gpu, **{field: value}, **short) is not None

    return _bisect(fits, most)


def _bisect(fits: Callable[[int], bool], most: int) -> int:
    if fits(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _reason(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, field: str, value: int, what: str) -> str:
    """Why one more fails."""
    if field == "context" and value == spec.max_position_embeddings:
        return f"{value:,} {what}: the model has no more positions"
    if field == "concurrency" and value == _MOST_USERS:
        return f"{value:,} {what}: no more are looked for"
    try:
        more = ServingPlan.model_validate(plan.model_dump(exclude_unset=True) | {field: value + 1})
        capacity = capacity_of(spec, more, gpu)
    except (InputError, ValueError) as error:
        return f"{value:,} {what}: one more is refused ({error})"
    short = -(capacity.headroom or 0)
    needs = f"one more needs {show_bytes(capacity.needed or 0)} of {show_bytes(capacity.limit or 0)}"
    return (
        f"{value:,} {what}: {needs}" if short > 0 else f"{value:,} {what}: one more finds no whole block of the cache"
    )


def _layouts(plan: ServingPlan) -> Iterator[dict[str, object]]:
    """More and more GPUs a stage: llama.cpp shares out layers, everything else the tensors."""
    for count in _COUNTS:
        yield {"pp": count} if plan.engine == "llama.cpp" else {"tp": count}


def _gpus_needed(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None) -> int | None:
    for count, layout in zip(_COUNTS, _layouts(plan), strict=True):
        if _fits(spec, plan, gpu, **layout):
            return count
    return None


def _smallest_gpu(spec: ModelSpec, plan: ServingPlan) -> str | None:
    known = sorted((card.memory_bytes, name) for name, card in gpus().items() if card.memory_bytes)
    return next((name for _, name in known if _fits(spec, plan, gpus()[name])), None)


def _fixes(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, now: Capacity) -> Iterator[ServingChange]:
    """The changes that fit, those on the same GPUs first."""
    for values, cost in _moves(spec, plan, gpu):
        capacity = _fits(spec, plan, gpu, **values)
        if capacity and capacity.needed is not None:
            yield ServingChange(values, capacity.needed, (now.needed or 0) - capacity.needed, cost)
    for count, layout in zip(_COUNTS, _layouts(plan), strict=True):
        now_used = plan.pp if plan.engine == "llama.cpp" else plan.tp
        capacity = _fits(spec, plan, gpu, **layout) if count > now_used else None
        if capacity and capacity.needed is not None:
            cost = f"{count / now_used:g} times the GPUs"
            yield ServingChange(layout, capacity.needed, (now.needed or 0) - capacity.needed, cost)
            break
    name = _smallest_gpu(spec, plan)
    if name and gpu and name != gpu.name:
        capacity = _fits(spec, plan, gpus()[name])
        if capacity and capacity.needed is not None:
            yield ServingChange(
                {"gpu": name},
                capacity.needed,
                (now.needed or 0) - capacity.needed,
                f"another card: {gpus()[name].title}",
            )


def _moves(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None) -> Iterator[tuple[dict[str, object], str]]:
    """Changes on the same GPUs, the mildest first, each with its cost in words."""
    if plan.engine == "vllm":
        if not plan.enforce_eager:
            yield {"enforce_eager": True}, "no CUDA graphs: slower decode"
        for name, less in (("max_seqs", 256), ("max_seqs", 32), ("max_batched_tokens", 2048)):
            if (getattr(plan, name) or less + 1) > less:
                yield {name: less}, "fewer requests in a step" if name == "max_seqs" else "slower prefill"
    for name in _CACHE.get(plan.engine, ()):
        if name != plan.kv_dtype:
            yield {"kv_dtype": name}, f"a cache in {name}: a little quality"
    for name in _WEIGHTS[plan.engine]:
        if name != plan.weights and not (name == "nvfp4" and gpu and gpu.lacks("fp4")):
            yield {"weights": name}, f"weights in {name}: a checkpoint in that format, and some quality"
    if plan.engine == "llama.cpp" and plan.gpu_layers is None:
        yield {"gpu_layers": "auto"}, "layers on the host: much slower"
    for field, most in (("concurrency", plan.concurrency), ("context", plan.context)):
        value = _largest(spec, plan, gpu, field, most)
        if 0 < value < most:
            yield {field: value}, f"{value:,} for {most:,}"


def users_by_context(
    spec: ModelSpec, plan: ServingPlan, gpu: Gpu, contexts: Sequence[int], users: Sequence[int]
) -> list[int]:
    """For each context how many of `users` (ascending) fit: the edge of the map of contexts and users, found by halving."""
    found = []
    for context in contexts:
        low, high = 0, len(users)
        while low < high:
            middle = (low + high) // 2
            values = {"context": context, "concurrency": users[middle], "prompt": None, "output": None}
            capacity = capacity_of(spec, plan.model_copy(update=values), gpu)
            low, high = (middle + 1, high) if capacity.fits else (low, middle)
        found.append(low)
    return found
