"""Models from sizes alone have the published counts of the models of these sizes."""

import pytest

from calc.errors import InputError
from calc.model.bare import BareModelPlan, bare_model
from calc.parameters import parameters

# Llama 3.1 8B and 2 7B (their Hub pages); Mixtral 8x7B, total and active (its Hub page; arXiv 2401.04088: 47B and 13B)
PUBLISHED = [
    ({}, 8_030_261_248, 8_030_261_248),
    ({"num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000}, 6_738_415_616, 6_738_415_616),
    ({"vocab_size": 32000, "num_experts": 8}, 46_702_792_704, 12_879_925_248),
]


@pytest.mark.parametrize(("sizes", "total", "active"), PUBLISHED)
def test_sizes_of_a_published_model_give_its_count(sizes, total, active):
    answer = parameters(bare_model(BareModelPlan(**sizes)))
    assert (answer.total, answer.active) == (total, active)


def test_the_count_is_the_sum_written_out():
    h, layers, a, k, f, vocabulary = 96, 3, 6, 2, 160, 500
    plan = BareModelPlan(
        hidden_size=h, num_hidden_layers=layers, num_attention_heads=a, num_key_value_heads=k, intermediate_size=f,
        vocab_size=vocabulary,
    )  # fmt: skip
    attention = h * h + 2 * h * (h // a * k) + h * h
    assert parameters(bare_model(plan)).total == 2 * vocabulary * h + layers * (attention + 3 * h * f + 2 * h) + h


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"num_attention_heads": 33, "num_key_value_heads": 33}, "num_attention_heads"),
        ({"num_experts": 1, "experts_per_token": 2}, "experts_per_token"),
    ],
)
def test_sizes_that_do_not_go_together_are_named(sizes, named):
    with pytest.raises(InputError, match=named):
        bare_model(BareModelPlan(**sizes))
