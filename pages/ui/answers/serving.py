"""Views of a serving answer: verdict, bar, users against speed, memory against context, formats in one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import streamlit as st

from calc.commands import COMMANDS
from calc.errors import InputError
from calc.serving import ServingAnswer, ServingPlan, serve
from pages.ui import charts, parts, views, widgets
from pages.ui.charts import Curve, Limit
from pages.ui.fields import fields_of
from pages.ui.numbers import Figure, Numbers, figures
from pages.ui.scenario import Scenario, start
from pages.ui.views import Verdict

LEVERS: Final = ("weights", "kv_dtype", "engine")
# fields that one engine alone reads: title, engine, names
ENGINE_FIELDS: Final = (
    ("vLLM", "vllm", ("lora_slots", "lora_rank", "draft")),
    ("SGLang", "sglang", ("mem_fraction_static",)),
    ("TensorRT-LLM", "tensorrt-llm",
     ("free_gpu_memory_fraction", "max_tokens", "stream_steps", "poll_steps", "gather_steps")),
    ("llama.cpp", "llama.cpp",
     ("gpu_layers", "n_cpu_moe", "flash_attention", "cache_type_k", "cache_type_v", "kv_unified", "ubatch", "tensor_split",
      "gpu_memories")),
)  # fmt: skip
_FORMATS: Final = ("bf16", "fp8", "int8", "gptq-int4", "awq-int4", "nf4", "mxfp4", "nvfp4", "gguf-Q8_0", "gguf-Q4_K_M")


def verdict(answer: ServingAnswer, numbers: Numbers) -> Verdict:
    """Whether the load fits, how many fit at most, and how fast; of a load that does not fit first what is short, and no speed."""
    room = answer.capacity
    beyond = answer.spec.beyond_positions("context", answer.plan.context)
    need = [_need(answer, numbers), numbers.headroom(room.headroom)]
    if room.fits is False:
        said = [_too_heavy(answer, numbers), *need, users(answer, numbers) if room.sequences else ""]
    else:
        said = [users(answer, numbers), _pace(answer, numbers), *need]
    return Verdict(room.fits, "Serving", "; ".join(filter(None, [*said, *beyond])))


def without_effect(asked: Scenario, title: str) -> bool:
    """Whether a group of fields is another engine's, and nothing in it was set."""
    fields = fields_of(ServingPlan)
    engine = asked.value(fields["engine"])
    own = next(((other, names) for name, other, names in ENGINE_FIELDS if name == title), None)
    return own is not None and own[0] != engine and all(asked.value(fields[n]) == start(fields[n]) for n in own[1])


def users(answer: ServingAnswer, numbers: Numbers) -> str:
    """`14 users at 32,768 tokens fit`."""
    fits = answer.capacity.sequences
    if fits is None:
        return ""
    return f"{fits:,} requests of {answer.plan.context:,} tokens fit at once"


def _pace(answer: ServingAnswer, numbers: Numbers) -> str:
    """`8 at once get 52 tokens/s each, 400 in all`; nothing where no time is known."""
    pace, low, high = answer.speed, answer.speed.low, answer.speed.high
    if not pace.tpot_s:
        return ""
    band = f" ({numbers.count(low.tokens_per_s)} to {numbers.count(high.tokens_per_s)})" if low and high else ""
    each = numbers.count(1 / pace.tpot_s)
    total = f"{numbers.count(pace.tokens_per_s)} in all{band}"
    count = answer.plan.concurrency
    return f"one alone gets {each} tokens/s" if count == 1 else f"{count:,} at once get {each} tokens/s each, {total}"


def _need(answer: ServingAnswer, numbers: Numbers) -> str:
    """What serving needs on the GPU with the least room, of what it may take."""
    room, plan = answer.capacity, answer.plan
    if room.limit is None:
        return f"needs {numbers.show(answer.breakdown.total)} per GPU"
    of = f"{numbers.show(room.needed)} of {numbers.show(room.limit)}"
    if plan.kv_memory_gib:
        return f"the cache needs {of} given to it"
    assert answer.gpu
    assert answer.gpu.memory_bytes
    return f"needs {of} per GPU ({numbers.percent(room.limit / answer.gpu.memory_bytes)} of its memory)"


def _too_heavy(answer: ServingAnswer, numbers: Numbers) -> str:
    """Where the weights alone are more than the GPU has; nothing where they are not."""
    weights, memory = answer.weights_bytes, answer.gpu.memory_bytes if answer.gpu else None
    if memory is None or weights <= memory:
        return ""
    return f"the weights alone take {numbers.show(weights)} of {numbers.show(memory)}"


def picture(answer: ServingAnswer, numbers: Numbers, _: Scenario) -> None:
    """One bar: what one GPU holds under this load."""
    memory = answer.gpu.memory_bytes if answer.gpu else None
    limit = Limit("the GPU's memory", float(memory)) if memory else None
    found = parts.of_serving(answer)
    said = "One GPU under this load: " + ", ".join(f"{name} {numbers.show(value)}" for name, value in found)
    charts.stacked({"this load": found}, "bytes", numbers, "memory bar", said, limit)


def figures_of(answer: ServingAnswer, numbers: Numbers, _: Scenario | None = None) -> list[Figure]:
    """The four figures under the bar."""
    room, pace = answer.capacity, answer.speed
    return [
        Figure(
            "Requests that fit",
            numbers.count(room.sequences),
            f"Whole ones of {answer.plan.context:,} tokens; {numbers.exact(room.concurrency)} before rounding down",
            room.sequences,
        ),
        numbers.bytes(
            "KV cache a request",
            answer.kv_bytes_per_sequence,
            f"At {answer.plan.context:,} tokens; {answer.kv_bytes_per_token:,} bytes a token on each GPU; KV reduction "
            f"against MHA {numbers.ratio(answer.mha_ratio)}",
        ),
        Figure(
            "Tokens/s a user",
            numbers.count(None if pace.tpot_s is None else 1 / pace.tpot_s),
            f"One token takes {numbers.show(pace.tpot_s, 'seconds')} (TPOT) with {answer.plan.concurrency:,} requests; "
            f"the first {numbers.show(pace.ttft_s, 'seconds')} (TTFT) after a prompt of {answer.plan.prompt_tokens:,}",
            None if pace.tpot_s is None else 1 / pace.tpot_s,
        ),
        Figure("Tokens/s in all", numbers.count(pace.tokens_per_s), "Of all requests together", pace.tokens_per_s),
    ]


def glance(asked: Scenario, numbers: Numbers) -> None:
    """The first page's answer for serving: ribbon, bar, figures."""
    answer = COMMANDS["serve"].answer(asked.of(COMMANDS["serve"].plan), asked.spec(), asked.gpu())
    assert isinstance(answer, ServingAnswer)
    views.verdict(verdict(answer, numbers))
    widgets.ask_row(ServingPlan, LEVERS)
    picture(answer, numbers, asked)
    figures(figures_of(answer, numbers))


def _with(answer: ServingAnswer, values: Mapping[str, Any]) -> ServingAnswer | None:
    """The answer with other values; None where they are not allowed."""
    try:
        return serve(answer.spec, ServingPlan.model_validate({**answer.plan.model_dump(), **values}), answer.gpu)
    except (InputError, ValueError):
        return None


def against_users(answer: ServingAnswer, numbers: Numbers, _: Scenario) -> None:
    """Tokens/s of all and of each user against concurrent requests, cut where memory ends."""
    most = max(answer.capacity.sequences or 1, answer.plan.concurrency, 1)
    counts = sorted(
        {*(1 << place for place in range(11) if 1 << place <= most), min(most, 4096), answer.plan.concurrency}
    )
    found = {count: _with(answer, {"concurrency": count}) for count in counts}
    total = [(float(n), each.speed.tokens_per_s if each else None) for n, each in found.items()]
    single = [(float(n), 1 / each.speed.tpot_s if each and each.speed.tpot_s else None) for n, each in found.items()]
    now = float(answer.plan.concurrency)
    left, right = st.columns(2)
    with left:
        charts.title("Tokens/s in all, against concurrent requests")
        charts.curves([Curve("tokens/s in all", total)], "concurrent requests", "tokens/s", numbers, "throughput",
                      "Tokens per second of all requests against concurrent requests", now=now)  # fmt: skip
    with right:
        charts.title("Tokens/s a user")
        charts.curves([Curve("tokens/s for each user", single)], "concurrent requests", "tokens/s", numbers, "per user",
                      "Tokens per second of one request against concurrent requests", now=now)  # fmt: skip
    if answer.capacity.sequences is not None:
        st.caption(
            f"The curves end where memory does: {answer.capacity.sequences:,} requests of {answer.plan.context:,} tokens."
        )


def against_context(answer: ServingAnswer, numbers: Numbers, _: Scenario) -> None:
    """GPU memory against the context, all else as it is."""
    tokens = sorted({*(1 << place for place in range(9, 21)), answer.plan.context})
    points = []
    for count in tokens:
        found = _with(answer, {"context": count, "prompt": answer.plan.prompt and min(answer.plan.prompt, count)})
        points.append((float(count), float(found.capacity.needed or found.breakdown.total) if found else None))
    limit = answer.capacity.limit
    charts.curves(
        [Curve("GPU memory", points)], "context (tokens)", "bytes", numbers, "memory against context",
        "GPU memory against context", Limit("what serving may take", float(limit)) if limit else None, float(answer.plan.context),
    )  # fmt: skip


def formats(answer: ServingAnswer, numbers: Numbers, _: Scenario) -> None:
    """Every weight format in one table: bytes, requests that fit, speed."""
    rows: dict[str, list[str]] = {"Weights": [], "Bytes on one GPU": [], "Requests that fit": [], "Tokens/s in all": []}
    for name in dict.fromkeys((str(answer.plan.weights or ""), *_FORMATS)):
        found = _with(answer, {"weights": name}) if name else answer
        if found is None:
            continue
        values = (
            name or "declared", numbers.show(found.weights_bytes), numbers.count(found.capacity.sequences),
            numbers.count(found.speed.tokens_per_s),
        )  # fmt: skip
        for column, value in zip(rows.values(), values, strict=True):
            column.append(value)
    st.dataframe(
        rows, hide_index=True, alt="Formats of the weights with bytes, requests that fit and tokens per second"
    )
