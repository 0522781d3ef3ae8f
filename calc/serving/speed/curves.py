"""Curves of a served model: speed against users and prompts, and memory against context, many points at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calc.errors import InputError
from calc.hardware import Gpu
from calc.model.spec import ModelSpec
from calc.serving.answer import serve
from calc.serving.cache import cache_of
from calc.serving.capacity import Capacity
from calc.serving.plan import ServingPlan
from calc.serving.speed.estimate import load_of, rules_of, step_times
from calc.serving.speed.load import Pace, pace

Array = NDArray[np.float64]
_UNBOUNDED = Capacity(None, None, None, None, None)


def users_and_prompts(
    spec: ModelSpec, plan: ServingPlan, gpu: Gpu, users: Array, prompts: Array, *, queueing: bool = True
) -> Pace:
    """The pace at every pair of users and prompt tokens (arrays that broadcast). InputError where the card has no times.

    `queueing`: what the cache cannot hold waits; without, every user is served at once, whatever the memory.
    """
    answer = serve(spec, plan, gpu)
    steps, rules = step_times(spec, answer.plan, gpu), rules_of(answer.plan, gpu)
    tokens = answer.capacity.tokens if queueing else None
    load = load_of(answer.plan, _UNBOUNDED, rules)
    lengths = np.asarray(prompts, dtype=float) * plan.mean_length
    fits: Any = np.inf
    if tokens is not None:
        fits = np.maximum(tokens * plan.dp / (lengths + load.output * (1 + rules.reserves) / 2), 1.0)
    return pace(replace(load, concurrency=np.asarray(users, dtype=float), prompt=lengths, fits=fits), rules, steps)


def speed_by_users(spec: ModelSpec, plan: ServingPlan, gpu: Gpu, users: Array) -> Pace:
    """Throughput and the speed that each user sees, against users: the plan's prompt and output."""
    return users_and_prompts(spec, plan, gpu, users, np.full(np.shape(users), float(plan.prompt_tokens)))


def memory_by_context(spec: ModelSpec, plan: ServingPlan, contexts: list[int]) -> list[int]:
    """Bytes of the cache of the plan's sequences on one GPU, at each context. InputError for a context below 1."""
    if any(context < 1 for context in contexts):
        raise InputError.of("context", min(contexts), "it must be at least 1")
    cache = cache_of(spec, plan if plan.kv_dtype != "auto" else plan.model_copy(update={"kv_dtype": "bf16"}))
    return [plan.concurrency * cache.sequence_bytes(spec.layers.counts, context) for context in contexts]
