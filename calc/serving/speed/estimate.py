"""The speed of a serving plan: the ideal roofline, and next to it the time of steps summed from measured kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from math import inf
from typing import Literal

from calc.breakdown import Breakdown, Component
from calc.errors import InputError
from calc.hardware import Gpu
from calc.kernel_times import kernel_times
from calc.model.spec import ModelSpec
from calc.serving.cache import Cache
from calc.serving.capacity import Capacity
from calc.serving.formats import weight_format
from calc.serving.plan import ServingPlan
from calc.serving.speed.load import Load, Pace, pace
from calc.serving.speed.operations import Operations
from calc.serving.speed.roofline import Ends, Speed, roofline
from calc.serving.speed.scheduling import Scheduling, engine_rules, scheduling
from calc.serving.speed.step import StepTimes
from calc.serving.speed.work import Layout
from calc.serving.weights import StoredWeights

_Kernels = Literal["vllm", "sglang", "trtllm"]
_KERNELS: dict[str, _Kernels] = {"vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "trtllm"}
# TensorRT-LLM computes experts in FP8 blocks on Blackwell with its own kernels (_torch/model_config.py of 1.3, resolve_moe_backend: AUTO
# is TRTLLM there), but its table has DeepGEMM's (moe_config.backend DEEPGEMM). vLLM 0.24's table of these GPUs is of the former, which
# FlashInfer carries ("flashinfer_trtllm" in its kernel_source).
_TRTLLM_GEN: _Kernels = "vllm"

# The 90th percentile of the relative error on 600 published runs (tests/published/serving_speed.py) of the time to the first token and of
# that per further token: with the GPU's own tables, and with them withheld, so that its nearest relative's stand in.
ERRORS = {"measured": (0.54, 0.31), "by relation": (0.56, 0.38)}


def speed(
    spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, stored: StoredWeights, cache: Cache, capacity: Capacity
) -> Speed:
    """The plan's speed by the times that it asks for; the roofline where that is asked for (by name, or by shares of it) and where
    nothing else is known."""
    ideal = roofline(spec, plan, gpu, stored, cache)
    own = plan.times is None and min(plan.compute_efficiency, plan.bandwidth_efficiency) < 1
    if plan.times == "roofline" or own or gpu is None or not spec.generates:
        return ideal
    try:
        steps = step_times(spec, plan, gpu)
    except InputError as error:
        if plan.times:
            raise
        return replace(ideal, notes=(*ideal.notes, f"no measured kernels: {error}"))
    rules = rules_of(plan, gpu)
    found = pace(load_of(plan, capacity, rules), rules, steps)
    speed = _speed(plan, steps, found, ideal)
    if capacity.sequences == 0:
        text = "it does not fit, so no sequence has room: the times are those it would have if it did"
        return replace(speed, notes=(*speed.notes, text))
    return speed


def step_times(spec: ModelSpec, plan: ServingPlan, gpu: Gpu) -> StepTimes:
    """The step of this plan's layout and formats; what only the load changes finds it made."""
    return _step_times(
        spec,
        gpu,
        plan.engine,
        plan.times or "measured",
        Layout(plan.tp, plan.ep, plan.dp, plan.pp),
        plan.weights,
        plan.kv_dtype,
        plan.draft_tokens,
        plan.enforce_eager,
        plan.moe_backend,
    )


@lru_cache(maxsize=64)
def _step_times(
    spec: ModelSpec,
    gpu: Gpu,
    engine: str,
    times: Literal["measured", "calibrated", "roofline"],
    layout: Layout,
    weights: str,
    kv: str,
    draft: int,
    eager: bool,
    moe_backend: str,
) -> StepTimes:
    kernels = kernel_times(gpu, times, _KERNELS.get(engine))
    blackwell = (gpu.compute_capability or "").startswith("10.")
    experts = None
    if engine == "tensorrt-llm" and blackwell and moe_backend != "deepgemm":
        experts = kernel_times(gpu, times, _TRTLLM_GEN)
    form = weight_format(spec, weights)
    operations = Operations(spec, layout, kernels, form, kv, query=1 + draft, fp8_block_experts=experts)
    return StepTimes(operations, engine_rules(engine).graph_tokens, eager)


def rules_of(plan: ServingPlan, gpu: Gpu) -> Scheduling:
    """The engine's scheduling with what the plan sets."""
    rules = scheduling(plan, gpu)
    return replace(
        rules,
        step_tokens=rules.step_tokens * plan.dp,
        sequences=rules.sequences * plan.dp,
        poll_steps=plan.poll_steps if plan.engine == "sglang" else 1,
        streams=plan.stream_steps if plan.engine == "tensorrt-llm" else 1,
        gathers=_all_ranks(plan.dp),
        gather_steps=plan.gather_steps if plan.engine == "tensorrt-llm" else 0,
        static=plan.batching == "static",
        mixes=rules.mixes and plan.batching != "static",
    )


def _all_ranks(ranks: int) -> int:
    """Prompts until each rank has one, where each comes to a random rank: n (1 + 1/2 + ... + 1/n) in expectation."""
    return round(ranks * sum(1 / at for at in range(1, ranks + 1)))


def load_of(plan: ServingPlan, capacity: Capacity, rules: Scheduling) -> Load:
    """The traffic that the plan describes; lengths are means. With room for no sequence, as though there were room for all.

    The capacity counts sequences of the plan's context; what runs has its prompt and half of its output on average, or as much more
    of the output as the engine reserves.
    """
    prompt, output = plan.prompt_tokens * plan.mean_length, max(plan.output_tokens, 1) * plan.mean_length
    fits = inf
    if capacity.sequences:
        fits = max(1.0, capacity.sequences * plan.dp * plan.context / (prompt + output * (1 + rules.reserves) / 2))
    return Load(
        plan.concurrency,
        prompt,
        output,
        min(plan.cached_prompt, prompt - 1),
        plan.length_spread,
        plan.rounds,
        fits,
        plan.repeated_prompts,
        plan.tokens_a_step,
    )


def _speed(plan: ServingPlan, steps: StepTimes, found: Pace, ideal: Speed) -> Speed:
    kernels = steps.operations.times
    first, each = ERRORS["by relation" if "relation" in kernels.source else "measured"]
    notes = [*ideal.notes, *kernels.notes]
    if plan.engine not in (*_KERNELS, "logical"):
        notes.append(f"the kernels are those of the tables (vLLM, SGLang, TensorRT-LLM), not {plan.engine}'s own")
    if plan.pp > 1:
        notes.append("a step passes the stages one after another; several batches under way at once are not counted")
    if plan.engine == "tensorrt-llm" and plan.stream_steps > 1:
        notes.append(
            "that the first token waits for the stream interval is inferred from published runs, not read in its source"
        )
    if found.queued:
        notes.append(f"{plan.concurrency:,} requests are more than the cache holds at once: the rest queue")
    ends = [Ends(float(each.ttft), float(each.tpot), float(each.tokens_per_s)) for each in found.between or (found,)]
    if found.between:
        notes.append(_unknown_lengths(*ends))
    if plan.rounds and plan.concurrency > 1:
        notes.append(
            f"ttft_s is the mean over {plan.rounds:,} requests of each user; the first {plan.concurrency:,} arrive at once, and their "
            "prompts wait for each other (a load test's opening; rounds 0: a steady stream)"
        )
    ttft, tpot, rate = float(found.ttft), float(found.tpot), float(found.tokens_per_s)
    running = min(plan.concurrency, rate * tpot)
    return replace(
        ideal,
        ttft_s=ttft,
        tpot_s=tpot,
        tokens_per_s=rate,
        notes=tuple(notes),
        source=kernels.source,
        low=_scaled(min, ends, 1 / (1 + first), 1 / (1 + each)),
        high=_scaled(max, ends, 1 / (1 - first), 1 / (1 - each)),
        itl_p95_s=float(found.late),
        prefill_s=float(found.prefill),
        queued_s=float(found.queued),
        decode_step=partial(_step, steps, running, plan.prompt_tokens + plan.output_tokens / 2),
        ideal=Ends(ideal.ttft_s, ideal.tpot_s, ideal.tokens_per_s),
        cost_per_million_tokens=_cost(plan, rate),
    )


def _scaled(end: Callable[[list[float]], float], ends: list[Ends], first: float, each: float) -> Ends:
    """The lowest or the highest of some estimates, times a factor for the first token and one for the others."""
    columns = zip(*((row.ttft_s or 0.0, row.tpot_s or 0.0, row.tokens_per_s or 0.0) for row in ends), strict=True)
    ttft, tpot, rate = (end(list(column)) for column in columns)
    return Ends(ttft * first, tpot * each, rate * each)


def _unknown_lengths(equal: Ends, varied: Ends) -> str:
    """Where equal lengths and lengths that vary lie, in a sentence."""

    def ms(seconds: float | None) -> str:
        return f"{(seconds or 0.0) * 1e3:,.1f} ms"

    return (
        f"length_spread is left out: times are the middle between requests of equal lengths, which stay in step (first token "
        f"{ms(equal.ttft_s)}, further ones {ms(equal.tpot_s)}), and of lengths that vary by a fifth "
        f"({ms(varied.ttft_s)}, {ms(varied.tpot_s)})"
    )


def _step(steps: StepTimes, sequences: float, context: float) -> Breakdown:
    return Breakdown(Component("step", children=steps.components(sequences, context)), "seconds")


def _cost(plan: ServingPlan, tokens_per_s: float) -> float | None:
    """Price of a million output tokens of all sequences, where the plan names one for a GPU."""
    if plan.price_per_gpu_hour is None or not tokens_per_s:
        return None
    return plan.price_per_gpu_hour * plan.tp * plan.dp * plan.pp / 3600 / tokens_per_s * 1e6
