"""The event simulator against closed forms: M/D/1, static batches, preemption, samples of one prompt."""

import math
import random

import pytest

from calc.errors import InputError
from calc.serving.simulation.blocks import BlockPool
from calc.serving.simulation.replica import Request, simulate
from calc.serving.speed.scheduling import Scheduling

MIXED = Scheduling(mixes=True, chunks=True, step_tokens=8192, sequences=1024, source="", ahead=0)
PROMPTS_FIRST = Scheduling(mixes=False, chunks=True, step_tokens=8192, sequences=1024, source="", ahead=0)


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch):
    monkeypatch.setattr("calc.serving.simulation.replica.TOKENISE", 0.0)


class Linear:
    """A step takes a second for each prompt, `token` for each new token, and `decode` where any sequence decodes."""

    def __init__(self, prompt=0.0, token=0.0, decode=0.0):
        self.prompt, self.token, self.decode = prompt, token, decode

    def mixed(self, sequences, context, prefills, new, cached):
        return self.prompt * prefills + self.token * prefills * new + (self.decode if sequences else 0.0)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_at_a_time_with_random_arrivals_is_an_m_d_1_queue(load):
    """Mean wait of M/D/1: load / (2 (1 - load)) services (Pollaczek and Khinchine)."""
    draw, now, requests = random.Random(1), 0.0, []
    for _ in range(40_000):
        now += draw.expovariate(load)
        requests.append(Request(8, 1, now))
    one = Scheduling(mixes=False, chunks=False, step_tokens=8, sequences=1, source="", ahead=0)
    trace = simulate(requests, one, Linear(prompt=1.0))
    wait = sum(each.first - each.arrival - 1.0 for each in trace.outcomes) / len(requests)
    assert wait == pytest.approx(load / (2 * (1 - load)), rel=0.05)


def test_a_static_batch_waits_for_its_longest():
    draw = random.Random(2)
    outputs = [draw.randint(2, 200) for _ in range(64)]
    rules = Scheduling(mixes=False, chunks=False, step_tokens=10**6, sequences=8, source="", ahead=0, static=True)
    trace = simulate([Request(16, output) for output in outputs], rules, Linear(decode=1.0))
    longest = sum(max(outputs[at : at + 8]) - 1 for at in range(0, 64, 8))
    assert trace.seconds == pytest.approx(longest)
    used = sum(output - 1 for output in outputs)
    waste = 1 - used / (8 * trace.seconds)
    assert waste == pytest.approx(1 - sum(outputs) / (8 * (longest + 8)), abs=0.01)
    continuous = simulate([Request(16, output) for output in outputs], PROMPTS_FIRST, Linear(decode=1.0))
    assert continuous.seconds == max(outputs) - 1


def test_a_mixed_step_takes_prompts_next_to_decoding_and_prompts_first_holds_decoding_up():
    times = Linear(prompt=1.0, decode=0.01)
    requests = [Request(4096, 101, 0.0), Request(8192, 101, 0.5)]
    mixed, first = simulate(requests, MIXED, times), simulate(requests, PROMPTS_FIRST, times)
    assert mixed.outcomes[0].first == 1.0
    assert mixed.outcomes[1].first == pytest.approx(
        3.02
    )  # 8191 tokens next to the one that decodes, the last in the next step
    assert first.outcomes[1].first == pytest.approx(2.0)
    assert first.outcomes[0].last == pytest.approx(2.0 + 100 * 0.01)


def test_chunks_of_a_prompt_take_as_many_steps_as_the_budget_asks():
    trace = simulate([Request(20_000, 1)], MIXED, Linear(prompt=1.0, token=0.001))
    assert trace.outcomes[0].first == pytest.approx(3 + 20.0)
    assert [prompts for _, _, _, prompts in trace.steps] == [1, 1, 1]


def test_a_draft_ends_a_sequence_in_fewer_steps():
    trace = simulate([Request(10, 101)], MIXED, Linear(decode=1.0), tokens_a_step=2.5)
    assert trace.seconds == 40


def test_a_full_cache_preempts_the_newest_and_everything_still_ends():
    requests = [Request(100, 200) for _ in range(10)]
    trace = simulate(requests, MIXED, Linear(decode=1.0), cache_tokens=1500, block=1)
    assert trace.preemptions > 0
    assert trace.most_cached <= 1500
    assert all(each.last > each.first >= 0 for each in trace.outcomes)
    assert trace.outcomes[0].preempted == 0
    reserving = Scheduling(mixes=True, chunks=True, step_tokens=8192, sequences=1024, source="", ahead=0, reserves=1.0)
    queued = simulate(requests, reserving, Linear(decode=1.0), cache_tokens=1510, block=1)
    assert queued.preemptions == 0
    assert queued.seconds == pytest.approx(2 * 199, abs=3)  # five at a time


def test_a_request_larger_than_the_cache_is_refused():
    with pytest.raises(InputError, match=r"request 0 needs more than the 50 tokens"):
        simulate([Request(100, 2)], MIXED, Linear(), cache_tokens=50, block=1)


def test_a_closed_loop_keeps_every_slot_busy():
    requests = [Request(10, 11, 0.0 if at < 4 else None, at % 4) for at in range(12)]
    trace = simulate(requests, MIXED, Linear(decode=1.0))
    assert trace.seconds == pytest.approx(30)
    assert [each.arrival for each in trace.outcomes[4:8]] == [each.last for each in trace.outcomes[:4]]


def test_samples_share_the_blocks_of_their_prompt_as_the_pool_counts():
    block, prompt, output, samples = 16, 100, 40, 4
    pool = BlockPool(1000, block)
    first = pool.allocate(prompt)
    others = [pool.fork(first) for _ in range(samples - 1)]
    for _ in range(output):
        for each in (first, *others):
            pool.append(each)
    trace = simulate([Request(prompt, output, samples=samples)], MIXED, Linear(decode=1.0), block=block)
    assert pool.copies == samples - 1
    assert trace.most_cached == pytest.approx(pool.used * block, abs=samples * block / 2)
    assert pool.used == prompt // block + samples * math.ceil((prompt % block + output) / block)


def test_the_pool_gives_back_what_nobody_uses():
    pool = BlockPool(4, 4)
    one = pool.allocate(9)
    assert (pool.used, pool.wasted([one])) == (3, 3)
    two = pool.fork(one)
    assert pool.used == 3
    pool.append(two)
    assert (pool.used, pool.copies) == (4, 1)
    pool.free(one)
    assert pool.used == 3
    with pytest.raises(InputError, match="1 free blocks and the sequence needs 2"):
        pool.allocate(8)
    pool.free(two)
    assert pool.used == 0


def test_ten_thousand_requests_run_and_nobody_is_lost():
    draw = random.Random(3)
    requests = [Request(draw.randint(10, 2000), draw.randint(2, 500), at * 0.02) for at in range(10_000)]
    trace = simulate(requests, MIXED, Linear(token=1e-6, decode=0.005), cache_tokens=200_000)
    assert all(each.arrival <= each.first <= each.last for each in trace.outcomes)
