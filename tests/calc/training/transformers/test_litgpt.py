"""litgpt's finetuning against the tables of its tutorials."""

from __future__ import annotations

import pytest

from calc.errors import InputError, validated
from calc.model.config import from_config
from calc.training import TrainingPlan, train
from calc.units import round_up
from tests.calc.training.models import model
from tests.latex import assert_formulas_hold

PLAN = {"implementation": "litgpt", "seq": 1304, "method": "lora"}
# github.com/Lightning-AI/litgpt, tutorials/resource-tables.md (October 2023): trainable parameters of queries and values at rank 8
TRAINABLE = {"llama-2-7b": 4_194_304, "llama-2-13b": 6_553_600}


@pytest.mark.parametrize(("name", "trainable"), TRAINABLE.items())
def test_the_adapters_are_as_many_as_litgpt_prints(name, trainable):
    answer = train(model(name), TrainingPlan(**PLAN))
    rows = [row for row in answer.worst.groups if row[0].tensors]
    elements = sum(tensor.elements * count for tensors, count in rows for tensor in tensors.tensors if tensor.adapter)
    assert elements == trainable
    assert answer.gradients_bytes == 2 * trainable  # bf16-true: adapters too


def test_all_three_projections_are_adapted_where_asked():
    asked = train(model("llama-2-7b"), TrainingPlan(**PLAN, lora_targets="query,key,value"))
    assert asked.gradients_bytes == 2 * TRAINABLE["llama-2-7b"] * 3 // 2


@pytest.mark.parametrize(("name", "rank"), [("llama-2-7b", 8), ("meta-llama-3-8b", 32)])
def test_projection_mlp_and_head_get_adapters_of_their_own(name, rank):
    """LoRALinear: r (in + out) numbers each; of a token a dropped input with its mask and A's output."""
    spec, plan = model(name), {**PLAN, "lora_rank": rank, "lora_dropout": 0.05, "lora_targets": "query,key,value"}
    more = {**plan, "lora_targets": "query,key,value,projection,mlp,head"}
    some, every = (train(spec, validated(TrainingPlan, each)) for each in (plan, more))
    layer = spec.layers.kinds[0]
    h, f, vocabulary = spec.hidden_size, layer.feed_forward.intermediate_size, spec.vocab_size
    adapters = spec.num_hidden_layers * rank * (2 * h + 3 * (h + f)) + rank * (h + vocabulary)
    assert every.gradients_bytes - some.gradients_bytes == 2 * adapters
    kept = every.worst.segments[5].bytes.kept - some.worst.segments[5].bytes.kept
    low = round_up(2 * rank * 1304, 512)
    assert kept == 1304 * 3 * (3 * h + f) + 4 * low
    head = every.worst.segments[-1].bytes.kept - some.worst.segments[-1].bytes.kept
    assert head == 1304 * 3 * h + low
    assert every.breakdown.total == every.peak_bytes
    assert_formulas_hold(every.breakdown)


def test_litgpts_gelu_is_one_operator_that_keeps_its_input():
    """Phi-2, whose transformers class composes it of eight."""
    plan = {"seq": 512, "method": "lora", "lora_rank": 8}
    own = train(model("phi-2"), validated(TrainingPlan, {**plan, "implementation": "litgpt"}))
    composed = train(model("phi-2"), validated(TrainingPlan, {**plan, "lora_targets": "q_proj,v_proj"}))
    kept = []
    for found in (own, composed):
        parts = {part.name: part for part in found.worst.segments[5].kept()}
        kept.append(parts["mlp"].total)
    assert kept == [2 * 512 * 10240, 4 * 2 * 512 * 10240]


def test_a_layer_keeps_what_its_fused_projection_and_its_padded_update_need():
    """Of h numbers a token: dropout's result and its mask, the update before its padding, the projection's whole output, joined
    queries and keys, attention's output; and the inputs of silu and of the product."""
    answer = train(model("llama-2-7b"), TrainingPlan(**PLAN, lora_dropout=0.05))
    h, f, tokens = 4096, 11008, 1304
    layer = answer.worst.segments[5].bytes.kept
    attention = (2 + 1 + 4 + 6 + 2 + 2 + 2) * h
    norms = 2 * 4 * h  # two RMS norms: an fp32 input of each
    feed_forward = 2 * 3 * f
    assert layer == pytest.approx(tokens * (attention + norms + feed_forward), rel=0.002)


def test_a_layer_with_grouped_heads_keeps_its_values_repeated_and_not_the_joint_projection():
    """litgpt/model.py copies each head's keys and values where heads share them, so that the joint output is freed; the update has
    as many numbers as queries and values."""
    answer = train(model("meta-llama-3-8b"), TrainingPlan(**PLAN, lora_dropout=0.05))
    h, kv, f, tokens = 4096, 1024, 14336, 1304
    attention = (2 + 1) * h + 2 * (h + kv) + 4 * 2 * h  # dropout and mask; update; queries, keys, values, output
    norms, feed_forward = 2 * 4 * h, 2 * 3 * f
    assert answer.worst.segments[5].bytes.kept == pytest.approx(tokens * (attention + norms + feed_forward), rel=0.002)


@pytest.mark.parametrize(
    "changes", [{}, {"method": "qlora", "quantization": "nf4-single", "bitsandbytes": "0.42"}, {"method": "full"}]
)
def test_leaves_sum_to_the_peak_and_every_formula_is_its_value(changes):
    answer = train(model("llama-2-7b"), TrainingPlan(**{**PLAN, **changes}))
    assert answer.breakdown.total == answer.peak_bytes
    assert_formulas_hold(answer.breakdown)


def test_bitsandbytes_up_to_0_42_kept_the_inputs_of_4_bit_products():
    """Llama-2-7B at 1,304 tokens: of a layer the second norm's output, attention's, and the product before the last projection; the
    first norm's is kept for the adapter anyway."""
    plan = {**PLAN, "method": "qlora", "quantization": "nf4-single"}
    old, new = (train(model("llama-2-7b"), TrainingPlan(**plan, bitsandbytes=version)) for version in ("0.42", "0.50"))
    more = 1304 * (32 * (2 * 4096 + 2 * 4096 + 2 * 11008) + 2 * 4096)  # and the head's input
    assert old.activations_bytes - new.activations_bytes == pytest.approx(more, rel=0.002)


def test_activations_in_host_memory_and_updates_in_backward_leave_what_they_say():
    plan = {"seq": 4096, "recompute": "full"}
    here, away = (train(model("llama-2-7b"), TrainingPlan(**plan, offload_activations=each)) for each in (False, True))
    assert here.activations_bytes - away.activations_bytes == 32 * 2 * 4096 * 4096  # each layer's input
    inside = train(model("llama-2-7b"), TrainingPlan(**plan, optimizer_in_backward=True))
    assert (inside.gradients_bytes, here.gradients_bytes) == (0, 2 * 6_738_415_616)
    assert inside.peak_bytes < here.peak_bytes - 2 * 6 * 10**9
    for answer in (away, inside):
        assert answer.breakdown.total == answer.peak_bytes


def test_qlora_over_two_gpus_takes_what_was_measured():
    """github.com/foundation-model-stack/fms-acceleration/issues/12: Llama-2-70B under FSDP at 29.5 to 36.3 GiB a device."""
    plan = TrainingPlan(method="qlora", dp=2, zero=3, recompute="full", micro_batch=2)
    assert 29.5 <= train(model("llama-2-70b"), plan).peak_bytes / 2**30 <= 36.3


# tutorials/resource-tables.md: trainable parameters of StableLM Alpha 3B, its vocabulary padded to 50,688
STABLELM = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_size": 4096, "num_hidden_layers": 16,
    "num_attention_heads": 32, "intermediate_size": 16384, "vocab_size": 50688, "rotary_pct": 0.25, "use_parallel_residual": True,
    "tie_word_embeddings": False, "max_position_embeddings": 4096,
}  # fmt: skip


def stablelm(**changes):
    return train(from_config(STABLELM, "stablelm"), validated(TrainingPlan, {**PLAN, "seq": 1034, **changes}))


@pytest.mark.parametrize(("adapter", "trainable"), [("llama-adapter", 573_888), ("llama-adapter-v2", 2_125_248)])
def test_llama_adapters_are_as_many_as_litgpt_prints(adapter, trainable):
    answer = stablelm(adapter=adapter)
    elements = sum(t.elements * count for tensors, count in answer.worst.groups for t in tensors.tensors if t.adapter)
    assert elements == trainable
    assert 0 <= answer.gradients_bytes - 2 * trainable < 512 * 400  # storages rounded up
    assert answer.breakdown.total == answer.peak_bytes
    assert_formulas_hold(answer.breakdown)


def test_layers_before_the_prompts_keep_nothing_and_scales_keep_each_linear_layers_output():
    h, f, tokens = 4096, 16384, 1034
    first, second = (stablelm(adapter=name).worst.segments for name in ("llama-adapter", "llama-adapter-v2"))
    assert (first[1].bytes.kept, first[2].bytes.kept) == (0, 0)
    assert second[1].bytes.kept > 0
    outputs = 2 * tokens * (3 * h + h + f + h)  # of the projection, the output, and both of the MLP
    assert second[5].bytes.kept - first[5].bytes.kept == pytest.approx(outputs, rel=0.01)


@pytest.mark.parametrize(
    "changes",
    [{"implementation": "hf"}, {"method": "full"}, {"lora_targets": "query"}, {"lora_dropout": 0.1}],
)
def test_llama_adapters_are_refused_where_litgpt_has_none(changes):
    with pytest.raises(InputError, match="adapter"):
        stablelm(adapter="llama-adapter", **changes)


def test_lightnings_4_bit_weights_come_out_in_fp16_and_are_cast():
    """At the head, the highest point: one more copy of 50,688 x 4,096 weights."""
    end, head = stablelm(method="qlora").worst.segments[-1].bytes, 2 * 50688 * 4096
    assert 2 * head < end.forward_peak - end.input < 2.1 * head
