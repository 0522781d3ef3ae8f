"""The topics about memory against counts made another way."""

import math

import pytest

from calc.catalogue import load
from calc.errors import InputError
from calc.learn.attention_memory import AttentionMemoryPlan, online_softmax, read_scores, traffic
from calc.learn.cache_kinds import CacheKindsPlan, cache_kinds
from calc.learn.checkpointing import CheckpointingPlan, best_distance, checkpoints
from calc.learn.low_rank import LowRankPlan, adapter, frozen
from calc.learn.paged_blocks import PagedBlocksPlan, paged_blocks
from calc.learn.zero_stages import ZeroStagesPlan, bytes_a_parameter, zero_stages
from calc.parameters import parameters
from calc.training import TrainingPlan, train


def test_zero_s_stages_take_what_its_paper_says():
    """ZeRO, arXiv 1910.02054, figure 1: 7.5 B parameters on 64 ranks take 120, 31.4, 16.6 and 1.9 GB."""
    found = zero_stages(ZeroStagesPlan())
    assert [round(stage.device / 1e9, 1) for stage in found[:4]] == [120.0, 31.4, 16.6, 1.9]
    # section 7: 2 Psi numbers of 2 bytes in stages 0 to 2, 3 Psi in stage 3, of which a rank of a ring sends (n - 1)/n
    whole = 7_500_000_000 * 2 * 63 // 64
    assert [stage.sent for stage in found[:4]] == [2 * whole, 2 * whole, 2 * whole, 3 * whole]


@pytest.mark.parametrize(
    ("recipe", "sum_"), [("mixed-16", 16), ("megatron-bf16", 18), ("amp", 16), ("fp32", 16), ("pure-bf16", 8)]
)
def test_a_parameter_takes_the_bytes_of_its_recipe(recipe, sum_):
    assert sum(bytes_a_parameter(recipe).values()) == sum_
    alone = zero_stages(ZeroStagesPlan(trained_parameters=1000, data_parallel_ranks=1, ledger=recipe))
    assert {stage.device for stage in alone[:4]} == {1000 * sum_}
    assert {stage.sent for stage in alone} == {0}


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_rank_s_states_are_those_of_the_training_answer(zero):
    spec = load("llama-3.2-1b")
    answer = train(spec, TrainingPlan(dp=4, zero=zero, recipe="mixed-16"))
    plan = ZeroStagesPlan(trained_parameters=parameters(spec).total, data_parallel_ranks=4)
    stage = zero_stages(plan)[zero]
    assert stage.weights == answer.parameters_bytes
    assert stage.gradients == answer.gradients_bytes
    assert stage.optimizer == answer.optimizer_bytes


def run_chain(layers, every):
    """Inputs alive at most and layers run again, by running a chain backward with a set of the inputs that are there."""
    kept = {at for at in range(layers) if at % every == 0}
    alive, most, again = set(kept), len(kept), 0
    for layer in reversed(range(layers)):
        if layer not in alive:
            start = layer - layer % every
            for at in range(start + 1, layer + 1):
                alive.add(at)
                again += 1
        most = max(most, len(alive))
        alive.discard(layer)
    return len(kept), most, again


@pytest.mark.parametrize("layers", [1, 2, 7, 16, 36, 37, 100])
def test_checkpoints_are_those_of_a_chain_that_runs(layers):
    for every in range(1, layers + 1):
        found = checkpoints(CheckpointingPlan(chain_layers=layers, checkpoint_every=every))
        assert (found.kept, found.peak, found.recomputed) == run_chain(layers, every)


@pytest.mark.parametrize("root", [2, 4, 6, 10])
def test_no_distance_of_a_square_is_better_than_its_root(root):
    at_root = checkpoints(CheckpointingPlan(chain_layers=root * root, checkpoint_every=root))
    assert best_distance(root * root).peak == at_root.peak == 2 * root - 1
    assert at_root.extra == 1 - 1 / root


def test_lora_s_worked_number():
    """65,536 parameters for rank 8 next to a matrix of 4096 x 4096, 0.39 % of it."""
    assert (adapter(LowRankPlan()).total, frozen(LowRankPlan())) == (65_536, 16_777_216)
    with pytest.raises(InputError, match="rank"):
        adapter(LowRankPlan(adapter_rank=5000))


def walked(tokens, size, keys, queries):
    """Numbers moved by FlashAttention's algorithm 1, one tile after another."""
    moved = 0
    for start in range(0, tokens, keys):
        moved += 2 * size * min(keys, tokens - start)
        for at in range(0, tokens, queries):
            rows = min(queries, tokens - at)
            moved += 3 * size * rows + 4 * rows
    return moved


@pytest.mark.parametrize(("tokens", "size", "kib"), [(4096, 64, 192), (1000, 128, 100), (1, 64, 64), (513, 32, 16)])
def test_attention_moves_what_its_loops_move(tokens, size, kib):
    plan = AttentionMemoryPlan(attention_tokens=tokens, attention_head_size=size, on_chip_kib=kib)
    found = traffic(plan)
    assert found.flash == 2 * walked(tokens, size, found.block_keys, found.block_queries)
    assert found.block_keys == min(tokens, math.ceil(kib * 1024 / 2 / (4 * size)))
    assert found.block_queries == min(found.block_keys, size)
    # Q, K, V read and O written; S and P written and read
    assert found.standard == 2 * (4 * tokens * size + 2 * 2 * tokens * tokens)


@pytest.mark.parametrize("block", [1, 2, 5, 64])
def test_the_online_softmax_ends_with_the_softmax_s_own_sum(block):
    scores = read_scores("1, 3, 2, 5, 0, 4, -7.5")
    last = online_softmax(scores, block)[-1]
    assert last.largest == 5
    assert last.total == pytest.approx(math.fsum(math.exp(score - 5) for score in scores), rel=1e-14)


@pytest.mark.parametrize("text", ["", "a", "1;2", "nan", "1e9", "inf", ",".join(["1"] * 65)])
def test_what_is_no_score_is_named(text):
    with pytest.raises(InputError, match="scores"):
        read_scores(text)


def test_caches_take_what_their_papers_say():
    """Bytes a token: Llama-2-7B 524,288, Llama-3-8B 131,072, DeepSeek-V3 70,272; Falcon's one head 2 x 64 x 2 in 32 layers."""
    found = {each.name.split(": ")[1]: each for each in cache_kinds(CacheKindsPlan(cached=32768))}
    assert found["Llama-2-7B"].token_bytes == 524_288
    assert found["Llama-3-8B"].token_bytes == 131_072
    assert found["DeepSeek-V3"].token_bytes == 70_272
    assert found["Falcon-7B"].token_bytes == 2 * 64 * 2 * 32
    # past the window of 1,024 only every sixth of 48 layers grows: 8 layers of 8 heads of 256
    assert found["Gemma-3-12B"].token_bytes == 8 * 2 * 8 * 256 * 2
    assert found["Mamba-370M"].token_bytes == 0
    assert found["Llama-2-7B"].bytes == 32768 * 524_288


def test_blocks_of_a_prompt_of_nine_tokens():
    """vLLM's own example: 9 tokens in blocks of 4 take 3 blocks and leave 3 slots."""
    found = paged_blocks(PagedBlocksPlan(answers=1, answer_tokens=0))
    assert (found.slots, found.wasted) == (12, 3)


def test_a_shared_block_is_copied_once_for_each_further_answer():
    found = paged_blocks(PagedBlocksPlan(answers=3, answer_tokens=1))
    assert found.copied == 2  # the last user writes into the block itself
    assert [table[:2] for table in found.tables] == [found.tables[0][:2]] * 3
    assert len({table[2] for table in found.tables}) == 3
    assert found.users[found.tables[0][0]] == 3
    assert found.slots == 4 * 5
    assert found.contiguous_wasted == 3 * (32 - 10)
