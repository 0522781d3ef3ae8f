"""The step's operations and the closed forms of a load, against each other, against the simulator and against bounds."""

import random

import numpy as np
import pytest

from calc.breakdown import Breakdown, Component
from calc.catalogue import load
from calc.hardware import gpu
from calc.serving import ServingPlan, serve
from calc.serving.capacity import Capacity
from calc.serving.simulation.replica import Request, simulate
from calc.serving.speed.estimate import load_of, rules_of, step_times
from calc.serving.speed.load import Load, pace
from calc.serving.speed.scheduling import scheduling

H100 = gpu("h100-sxm-80gb")
MODEL = load("meta-llama-3.1-8b")
FREE = Capacity(None, None, None, None, None)


def plan(**changes):
    fields = {"engine": "vllm", "weights": "bf16", "kv_dtype": "bf16", "concurrency": 32, "prompt": 2048, "output": 512}
    return ServingPlan(**{"context": 8192, **fields, **changes})


def test_the_breakdown_of_a_step_sums_to_it_and_is_slower_than_the_roofline():
    answer = serve(MODEL, plan(), H100)
    step = answer.speed.step
    assert sum(row.value for row in step.rows()) == pytest.approx(step.total)
    assert len({row.path for row in step.rows()}) == len(step.rows())
    assert answer.speed.ideal.tpot_s < step.total < answer.speed.tpot_s
    assert answer.speed.low.tpot_s < answer.speed.tpot_s < answer.speed.high.tpot_s
    assert answer.speed.source == "table h100-sxm-80gb"


def test_the_grid_of_a_step_agrees_with_its_operations():
    steps = step_times(MODEL, plan(), H100)
    for sequences, context in [(1, 100), (7, 900), (32, 2300), (200, 5000)]:
        exact = sum(part.total for part in steps.components(sequences, context))
        assert steps.decode(sequences, context) == pytest.approx(exact, rel=0.03)


def test_numbers_and_arrays_give_the_same_pace():
    steps, rules = step_times(MODEL, plan(), H100), rules_of(plan(), H100)
    many = pace(Load(np.array([1.0, 8.0, 64.0]), 2048, 512, spread=0.2), rules, steps)
    for at, users in enumerate((1, 8, 64)):
        one = pace(Load(users, 2048, 512, spread=0.2), rules, steps)
        assert many.ttft[at] == pytest.approx(float(one.ttft))
        assert many.tpot[at] == pytest.approx(float(one.tpot))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize("users", [16, 128])
def test_the_closed_form_agrees_with_the_simulator_at_saturation(engine, users):
    asked = plan(engine=engine, concurrency=users, length_spread=0.2)
    steps, rules, draw = step_times(MODEL, asked, H100), rules_of(asked, H100), random.Random(0)
    requests = [
        Request(
            round(2048 * (1 - 0.2 * draw.random())),
            round(512 * (1 - 0.2 * draw.random())),
            0.0 if at < users else None,
            at % users,
        )
        for at in range(10 * users)
    ]
    trace = simulate(requests, rules, steps)
    pairs = list(zip(requests, trace.outcomes, strict=True))
    tpot = sum((each.last - each.first) / (request.output - 1) for request, each in pairs) / len(pairs)
    found = pace(load_of(asked, FREE, rules), rules, steps)
    assert float(found.tpot) == pytest.approx(tpot, rel=0.05)
    ttft = sum(each.first - each.arrival for _, each in pairs) / len(pairs)
    assert float(found.ttft) == pytest.approx(ttft, rel=0.1)
    tokens = sum(request.output for request in requests) / trace.seconds
    assert float(found.tokens_per_s) == pytest.approx(
        tokens, rel=0.1
    )  # the run's end, when slots fall idle, is in the simulator's


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize("users", [4, 16, 128])
def test_equal_lengths_agree_with_the_simulator_per_token(engine, users):
    """7 %: prompts that ended together come back in fuller steps than the closed form has with many users."""
    asked = plan(engine=engine, concurrency=users, length_spread=0.0)
    steps, rules = step_times(MODEL, asked, H100), rules_of(asked, H100)
    requests = [Request(2048, 512, 0.0 if at < users else None, at % users) for at in range(10 * users)]
    outcomes = simulate(requests, rules, steps).outcomes
    tpot = sum(each.last - each.first for each in outcomes) / 511 / len(outcomes)
    assert float(pace(load_of(asked, FREE, rules), rules, steps).tpot) == pytest.approx(tpot, rel=0.07)


@pytest.mark.parametrize("spread", [0.0, 0.2, None])
def test_a_steady_stream_waits_for_no_burst(spread):
    for users in (8, np.array([2.0, 8.0, 64.0])):
        steps, rules = step_times(MODEL, plan(), H100), rules_of(plan(), H100)
        steady, burst = (pace(Load(users, 2048, 512, spread=spread, rounds=each), rules, steps) for each in (0, 2))
        assert np.shape(steady.ttft) == np.shape(users)
        assert np.all(steady.ttft < burst.ttft)


def test_static_batches_waste_what_the_simulator_says():
    asked = plan(engine="sglang", concurrency=32, length_spread=0.5, batching="static")
    steps, rules, draw = step_times(MODEL, asked, H100), rules_of(asked, H100), random.Random(0)
    outputs = [round(512 * (1 - 0.5 * draw.random())) for _ in range(32 * 40)]
    batches = [
        simulate([Request(1536, output, tokenised=True) for output in outputs[at : at + 32]], rules, steps).seconds
        for at in range(0, len(outputs), 32)
    ]
    found = pace(load_of(asked, FREE, rules), rules, steps)
    assert float(found.tokens_per_s) == pytest.approx(sum(outputs) / sum(batches), rel=0.05)
    continuous = plan(engine="sglang", concurrency=32, length_spread=0.5)
    assert found.tokens_per_s < serve(MODEL, continuous, H100).speed.tokens_per_s


def test_more_users_are_slower_each_and_faster_together():
    steps, rules = step_times(MODEL, plan(), H100), rules_of(plan(), H100)
    found = pace(Load(2.0 ** np.arange(9), 2048, 512, spread=0.2), rules, steps)
    assert np.all(np.diff(found.tpot) > 0)
    assert np.all(np.diff(found.ttft) > 0)
    assert np.all(np.diff(found.tokens_per_s) > 0)


def test_what_does_not_fit_queues_by_littles_law():
    steps, rules = step_times(MODEL, plan(), H100), rules_of(plan(), H100)
    half, all_in = pace(Load(64, 2048, 512, fits=32), rules, steps), pace(Load(32, 2048, 512), rules, steps)
    whole = all_in.ttft + 511 * all_in.tpot
    assert half.queued == pytest.approx(float(whole))
    assert half.tokens_per_s == pytest.approx(float(all_in.tokens_per_s))


def test_what_does_not_fit_at_all_is_timed_as_though_it_did():
    mixtral = load("mixtral-8x7b-v0.1")
    found = serve(mixtral, plan(concurrency=8), H100)
    assert found.capacity.sequences == 0
    assert found.speed.ideal.tpot_s < found.speed.tpot_s
    assert any("does not fit" in note for note in found.speed.notes)


def test_a_draft_makes_the_expected_tokens_and_its_own_passes():
    drafted = plan(draft_tokens=3, draft_acceptance=0.5)
    assert drafted.tokens_a_step == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    plain, fast = step_times(MODEL, plan(), H100), step_times(MODEL, plan(draft_tokens=3), H100)
    assert plain.decode(4, 1000) < fast.decode(4, 1000) < 1.5 * plain.decode(4, 1000)


def test_without_cuda_graphs_a_small_step_takes_as_long_as_its_launches():
    eager, graphs = step_times(MODEL, plan(enforce_eager=True), H100), step_times(MODEL, plan(), H100)
    assert eager.decode(1, 1000) == pytest.approx(eager.launch)
    assert eager.launch > 1.5 * graphs.decode(1, 1000)


def test_tensor_parallelism_adds_two_all_reduces_a_layer():
    one, two = (step_times(MODEL, plan(tp=tp), H100).components(8, 1000) for tp in (1, 2))
    names = [{path for part in parts for path in _paths(part)} for parts in (one, two)]
    assert names[1] - names[0] == {
        "layers/all_reduce",
        "layers/all_reduce/mixer",
        "layers/all_reduce/feed_forward",
    }


def test_stages_add_their_sends_and_take_no_time_off_a_step():
    one, two = (step_times(MODEL, plan(pp=pp), H100) for pp in (1, 2))
    send = one.operations.times.collective("send", 8 * 4096 * 2, 2)
    assert two.decode(8, 1000) - one.decode(8, 1000) == pytest.approx(float(send), rel=1e-6)
    notes = serve(MODEL, plan(pp=2, engine="llama.cpp"), H100).speed.notes
    assert any("llama.cpp's own" in note for note in notes)
    assert any("one after another" in note for note in notes)


def _paths(part, prefix=""):
    path = f"{prefix}{part.name}"
    return {path}.union(*(_paths(child, f"{path}/") for child in part.children))


@pytest.mark.parametrize(
    ("name", "card", "fields"),
    [
        ("deepseek-r1", "b200-180gb", {"tp": 1, "dp": 8, "ep": 8, "engine": "tensorrt-llm"}),
        ("qwen3.5-397b-a17b", "h200-141gb", {"tp": 8, "ep": 8, "engine": "sglang"}),
        ("gpt-oss-120b", "a100-sxm-80gb", {"tp": 2}),
        ("glm-5", "b300-288gb", {"tp": 8}),
        ("deepseek-v4-pro", "b200-180gb", {"tp": 8}),
        ("mixtral-8x7b-v0.1", "rtx-4090-24gb", {"tp": 4, "weights": "gptq-int4"}),
        ("meta-llama-3.1-8b", "mi300x-192gb", {}),
        ("qwen3-0.6b", "t4-16gb", {"weights": "fp16"}),
    ],
)
def test_every_kind_of_layer_and_card_has_an_answer(name, card, fields):
    found = serve(
        load(name), ServingPlan(context=4096, prompt=2048, output=256, concurrency=8, **fields), gpu(card)
    ).speed
    assert 0 < found.ideal.tpot_s < found.tpot_s < 1
    assert 0 < found.ideal.ttft_s < found.ttft_s < 60


def test_a_card_without_fp8_multiplies_in_16_bits_and_reads_8():
    a100 = gpu("a100-sxm-80gb")
    eight, sixteen = (serve(MODEL, plan(weights=name), a100).speed for name in ("fp8", "bf16"))
    assert eight.ideal.tpot_s is None
    assert any("fp8 needs compute capability 8.9" in note for note in eight.notes)
    assert eight.tpot_s < sixteen.tpot_s


def test_the_roofline_is_one_word_away():
    ideal = serve(MODEL, plan(times="roofline"), H100).speed
    assert (ideal.source, ideal.step, ideal.low) == ("roofline", None, None)
    assert serve(MODEL, plan(), H100).speed.ideal.tpot_s == ideal.tpot_s


def test_engines_differ_in_their_rules():
    def rules(engine, card=H100, **changes):
        return scheduling(plan(engine=engine, **changes), card)

    assert rules("vllm").step_tokens == 8192
    assert rules("vllm", gpu("b200-180gb")).step_tokens == 16_384
    assert rules("vllm", gpu("b200-180gb"), engine_version="0.19").step_tokens == 8192
    assert not rules("sglang").mixes
    assert not rules("tensorrt-llm").chunks
    # one batch in flight before 0.14, two from there, and whole prompts first in the first engine
    assert [rules("vllm", engine_version=number).ahead for number in ("0.12", "0.14", "0.19")] == [1, 2, 2]
    assert rules("vllm", async_scheduling=False).ahead == 1
    assert not rules("vllm", engine_version="0.6").mixes


def test_a_draft_writes_a_recurrent_state_after_each_token_that_it_checks():
    spec = load("qwen3-next-80b-a3b-thinking")
    one, four = (
        step_times(spec, plan(weights="fp8", tp=4, draft_tokens=drafted), H100).components(64, 2048)
        for drafted in (0, 3)
    )

    def scan(parts):
        rows = Breakdown(Component("step", children=parts), "seconds").rows()
        return sum(row.value for row in rows if row.path.endswith("/scan"))

    assert scan(four) == pytest.approx(2.5 * scan(one))  # one read and four writes for one of each


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize("users", [1, 4, 64])
def test_unknown_lengths_lie_between_equal_and_varying_ones(engine, users):
    steps, rules = step_times(MODEL, plan(engine=engine), H100), rules_of(plan(engine=engine), H100)
    equal, varied, middle = (pace(Load(users, 2048, 512, spread=each), rules, steps) for each in (0.0, 0.2, None))
    for name in ("ttft", "tpot", "tokens_per_s"):
        low, high = float(getattr(equal, name)), float(getattr(varied, name))
        assert float(getattr(middle, name)) ** 2 == pytest.approx(low * high)
    assert [float(each.ttft) for each in middle.between] == [float(equal.ttft), float(varied.ttft)]


def test_an_answer_says_that_lengths_are_unknown_and_that_the_first_prompts_come_at_once():
    asked, told = serve(MODEL, plan(), H100).speed, serve(MODEL, plan(length_spread=0.2, rounds=0), H100).speed
    assert any(note.startswith("length_spread is left out") for note in asked.notes)
    assert any("the first 32 arrive at once" in note for note in asked.notes)
    assert not any("length_spread" in note or "at once" in note for note in told.notes)
    means = (load_of(plan(length_spread=spread), FREE, rules_of(plan(), H100)).prompt for spread in (None, 0.0, 0.2))
    assert tuple(means) == (2048, 2048, pytest.approx(0.9 * 2048))
    equal = serve(MODEL, plan(engine="sglang", length_spread=0.0), H100).speed
    unknown = serve(MODEL, plan(engine="sglang"), H100).speed
    assert unknown.high.ttft_s == pytest.approx(equal.high.ttft_s)  # the band covers both ends


def test_experts_in_fp8_blocks_on_blackwell_run_on_the_kernels_that_the_plan_names():
    deepseek, b200 = load("deepseek-r1"), gpu("b200-180gb")

    def experts(card, **changes):
        asked = plan(engine="tensorrt-llm", weights="fp8", tp=8, concurrency=16, **changes)
        step = serve(deepseek, asked, card).speed.step
        return next(row.value for row in step.rows() if row.path.endswith("moe/experts"))

    assert experts(b200) == experts(b200, moe_backend="trtllm")
    # 16 tokens, 8 ranks that split each expert: 208 to 220 µs with DeepGEMM, 103 with TensorRT-LLM's own (the tables' rows of this shape)
    assert experts(b200, moe_backend="deepgemm") / 58 == pytest.approx(220e-6, rel=0.06)
    assert experts(b200) / 58 == pytest.approx(103e-6, rel=0.06)
    hopper = gpu("h200-141gb")
    assert experts(hopper) == experts(hopper, moe_backend="deepgemm")
