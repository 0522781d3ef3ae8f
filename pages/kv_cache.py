"""How big the KV cache is, and how many tokens the GPU's leftover holds."""

from calc.serving import ServingAnswer, ServingPlan
from pages.ui import charts
from pages.ui.page import Question, show
from pages.ui.views import Metric, Numbers, Verdict, in_blocks, need, parts_below, too_heavy

TITLE, ICON = "KV cache", ":material/database:"
PLANS = (ServingPlan,)


def verdict(answer: ServingAnswer, numbers: Numbers) -> Verdict:
    room = answer.capacity
    beyond = answer.spec.beyond_positions("context", answer.plan.context)
    held = f"room for {numbers.show(room.budget)} of cache, {numbers.count(room.tokens)} tokens"
    said = [too_heavy(answer, numbers), need(answer, numbers), numbers.room(room.headroom), held, *beyond]
    return Verdict(room.fits, "Serving", "; ".join(filter(None, said)))


def headline(answer: ServingAnswer, numbers: Numbers) -> list[Metric]:
    room = answer.capacity
    return [
        Metric(
            "Per token", numbers.show(answer.kv_bytes_per_token), f"{answer.kv_bytes_per_token:,} bytes on each GPU"
        ),
        Metric(
            "Per sequence",
            numbers.show(answer.kv_bytes_per_sequence),
            f"At {answer.plan.context:,} tokens; {answer.kv_fixed_bytes:,} bytes of it are constant",
        ),
        Metric(
            "All sequences",
            numbers.show(answer.kv_bytes),
            f"{answer.kv_bytes:,} bytes, {answer.plan.concurrency:,} at once",
        ),
        Metric("Weights", numbers.show(answer.weights_bytes), f"{answer.weights_bytes:,} bytes, as {answer.format}"),
        Metric("Room for cache", numbers.show(room.budget), "What weights and activations leave of the GPU's share"),
        Metric("Tokens that fit", numbers.count(room.tokens), in_blocks(answer, numbers)),
        Metric(
            "Sequences that fit",
            numbers.count(room.sequences),
            f"Whole ones of {answer.plan.context:,} tokens; {numbers.exact(room.concurrency)} before rounding down. "
            f"With the activations of {answer.plan.concurrency:,} at once",
        ),
        Metric(
            "KV reduction against MHA",
            numbers.ratio(answer.mha_ratio),
            "The cache with keys and values for every query head, over this one",
        ),
        *_speed(answer, numbers),
    ]


def _speed(answer: ServingAnswer, numbers: Numbers) -> list[Metric]:
    pace, at_once = answer.speed, f"{answer.plan.concurrency:,} sequences"
    return [
        Metric(
            "First token (TTFT)",
            numbers.show(pace.ttft_s, "seconds"),
            f"Prefill of one prompt of {answer.plan.prompt_tokens:,} tokens; a roofline at the prefill and decode efficiency, "
            "without queue or communication",
        ),
        Metric(
            "Next token (TPOT)",
            numbers.show(pace.tpot_s, "seconds"),
            f"One decode step of {at_once}{f', bound by {pace.bound}' if pace.bound else ''}; the same roofline",
        ),
        Metric(
            "Tokens a second", numbers.count(pace.tokens_per_s, " tok/s"), f"Of {at_once} together: sequences over TPOT"
        ),
    ]


def _charts(answer: ServingAnswer, numbers: Numbers, key: str) -> None:
    memory = answer.gpu.memory_bytes if answer.gpu else None
    charts.title("One GPU at this load")
    limit = ("the GPU's memory", float(memory)) if memory else None
    charts.stacked({"this load": parts_below(answer.breakdown)}, "bytes", numbers, f"{key}load", limit)
    charts.title("The cache, and the room for it")
    rows: charts.Rows = {
        "a sequence": [("cache", answer.kv_bytes_per_sequence)],
        "this load": [("cache", answer.kv_bytes)],
        "room": [("room", answer.capacity.budget or 0)],
    }
    charts.stacked(rows, "bytes", numbers, f"{key}room")


QUESTION = Question(
    command="serve",
    intro="The KV cache while the model is served: bytes a token, a sequence and in all, and how many tokens fit after the weights.",
    groups={
        "": ("context", "concurrency", "weights", "kv_dtype"),
        "Layout and engine": (
            "tp",
            "pp",
            "engine",
            "gpu_memory_utilization",
            "block_size",
            "max_batched_tokens",
            "max_seqs",
            "kv_memory_gib",
        ),
        "Load": ("prompt", "output", "keep_window", "keep_sinks"),
        "Speed": ("compute_efficiency", "bandwidth_efficiency"),
    },
    headline=headline,
    charts=_charts,
    verdict=verdict,
)


def render() -> None:
    show(QUESTION)


if __name__ == "__main__":
    from app import main

    main()
