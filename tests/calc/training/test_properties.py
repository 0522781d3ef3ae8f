"""What must hold for any plan: monotone states and activations, and activations affine in the batch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calc.training import TrainingPlan, train
from tests.calc.training.models import model

MODELS = st.sampled_from(["llama-2-7b", "meta-llama-3-8b", "qwen3-8b", "mixtral-8x7b-v0.1", "gpt2", "olmo-2-1124-7b"])
NAMED = ["pure-bf16", "amp", "fp32", "mixed-16", "megatron-bf16", "megatron-fp16", "fsdp-bf16"]
RECIPES = st.sampled_from(NAMED)
IMPLEMENTATIONS = st.sampled_from(["hf", "fused", "paper"])
SEQ = st.sampled_from([512, 1024])
DEGREES = [1, 2, 4, 8]
RANKS = st.sampled_from(
    [2, 4, 8]
)  # FSDP2 deals out whole rows: where ranks do not divide them, or eight experts, its padding outweighs


def states(answer) -> int:
    return answer.parameters_bytes + answer.gradients_bytes + answer.optimizer_bytes


def kept(answer) -> int:
    """Activations without the weights that ZeRO-3 gathers."""
    return answer.activations_bytes - answer.worst.full_weights.kept_bytes


@settings(max_examples=60, deadline=None)
@given(MODELS, RECIPES, IMPLEMENTATIONS, RANKS, st.sampled_from(["adamw", "adamw-8bit", "adafactor"]))
def test_more_zero_never_raises_states_or_activations(name, recipe, implementation, dp, optimizer):
    answers = [
        train(
            model(name),
            TrainingPlan(seq=512, dp=dp, zero=zero, recipe=recipe, implementation=implementation, optimizer=optimizer),
        )
        for zero in range(4)
    ]
    sizes = [states(answer) for answer in answers]
    assert sizes == sorted(sizes, reverse=True)
    activations = [kept(answer) for answer in answers]  # DDP's buckets, which ZeRO-2 and 3 do without
    assert activations == sorted(activations, reverse=True)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["llama-2-7b", "meta-llama-3-8b", "mixtral-8x7b-v0.1"]),
    RECIPES,
    IMPLEMENTATIONS,
    SEQ,
    st.booleans(),
)
def test_more_tensor_parallelism_never_raises_states_or_activations(
    name, recipe, implementation, seq, sequence_parallel
):
    answers = [
        train(
            model(name),
            TrainingPlan(
                seq=seq,
                tp=tp,
                recipe=recipe,
                implementation=implementation,
                sequence_parallel=sequence_parallel if tp > 1 else None,
            ),
        )
        for tp in DEGREES
    ]
    assert [states(answer) for answer in answers] == sorted((states(answer) for answer in answers), reverse=True)
    found = [kept(answer) for answer in answers]
    assert found == sorted(found, reverse=True)


@settings(max_examples=60, deadline=None)
@given(MODELS, RECIPES, SEQ, st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_more_recomputation_never_raises_activations(name, recipe, seq, batch, tp):
    for implementation, levels in (
        ("hf", ["none", "full"]),
        ("fused", ["none", "selective", "full"]),
        ("paper", ["none", "selective", "full"]),
    ):
        answers = [
            train(
                model(name),
                TrainingPlan(
                    seq=seq, micro_batch=batch, tp=tp, recipe=recipe, implementation=implementation, recompute=level
                ),
            )
            for level in levels
        ]
        found = [answer.activations_bytes for answer in answers]
        assert found == sorted(found, reverse=True)
        assert len({states(answer) for answer in answers}) == 1


@settings(max_examples=40, deadline=None)
@given(MODELS, IMPLEMENTATIONS, SEQ, st.integers(1, 16))
def test_pipelines_divide_states_and_1f1b_holds_at_most_the_whole_stack_on_its_first_stage(
    name, implementation, seq, micro
):
    spec = model(name)
    previous = None
    for pp in (p for p in (1, 2, 4, 8) if spec.num_hidden_layers % p == 0):
        plan = TrainingPlan(seq=seq, pp=pp, global_batch=micro, implementation=implementation)
        answer = train(spec, plan)
        highest = max(sum(stage.states) for stage in answer.stages)
        assert previous is None or highest <= previous
        previous = highest
        if pp == 1:
            whole = answer.worst
        first = answer.stages[0]
        assert first.activations <= whole.activations


@settings(max_examples=60, deadline=None)
@given(MODELS, RECIPES, SEQ, st.sampled_from(["sdpa", "eager"]), st.sampled_from(["none", "full"]))
def test_transformers_activations_are_affine_in_the_batch_with_the_constant_that_is_named(
    name, recipe, seq, attention, recompute
):
    def answer(batch):
        return train(
            model(name),
            TrainingPlan(seq=seq, micro_batch=batch, recipe=recipe, attention=attention, recompute=recompute),
        )

    # from two sequences on: of one, eager attention reads the heads of a fused projection in place
    two, three, six = answer(2), answer(3), answer(6)
    slope = three.activations_bytes - two.activations_bytes
    assert six.activations_bytes == two.activations_bytes + 4 * slope
    constant = two.activations_bytes - 2 * slope
    assert constant == two.activation_constant_bytes


@settings(max_examples=60, deadline=None)
@given(
    MODELS, st.sampled_from(["fused", "paper"]), SEQ, st.integers(2, 9), st.sampled_from(["none", "selective", "full"])
)
def test_ledger_activations_are_proportional_to_the_batch(name, implementation, seq, batch, recompute):
    one, many = (
        train(
            model(name), TrainingPlan(seq=seq, micro_batch=size, implementation=implementation, recompute=recompute)
        ).activations_bytes
        for size in (1, batch)
    )
    assert many == batch * one


@pytest.mark.parametrize("recipe", NAMED)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("global_batch", [2, 8])
@pytest.mark.parametrize(
    ("implementation", "loss"), [("liger", "fused"), ("liger", "full"), ("hf", "fused"), ("hf", "chunked")]
)
def test_leaves_sum_to_the_peak_whatever_makes_the_loss_and_holds_the_gradients(
    implementation, loss, global_batch, optimizer, recipe
):
    values = {"implementation": implementation, "loss": loss, "optimizer": optimizer, "recipe": recipe}
    for zero in (0, 2, 3):
        plan = TrainingPlan(seq=4096, dp=2, zero=zero, global_batch=global_batch, **values)
        for name in ("llama-2-7b", "qwen3-0.6b"):
            answer = train(model(name), plan)
            assert answer.breakdown.total == answer.peak_bytes
