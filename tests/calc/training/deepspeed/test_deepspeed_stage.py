"""DeepSpeed's engine against a run that went out of memory in its step, and against the sizes that its own code asks for."""

from __future__ import annotations

import pytest

from calc.errors import InputError, validated
from calc.hardware import gpu
from calc.step_time.memory_bound import PROGRAMS as TIMED
from calc.training import TrainingPlan, train
from calc.training.deepspeed.engine import Engine
from calc.training.deepspeed.live_parameters import LiveParameters
from calc.training.deepspeed.settings import ZeroSettings
from calc.training.programs import PROGRAMS
from calc.units import GiB
from tests.calc.training.models import model
from tests.latex import assert_formulas_hold

LLAMA_2_7B = 6_738_415_616
PLAN = {"dp": 8, "zero": 2, "recipe": "mixed-16", "seq": 1024, "recompute": "full"}


def test_a_run_that_went_out_of_memory_in_adams_step_is_told_so():
    """github.com/hiyouga/LlamaFactory/issues/1221, Llama-2-7B on eight V100 of 32 GB under ZeRO-2: 28.28 GiB were allocated when
    the flat shard's second temporary, 3.14 GiB, was asked for."""
    answer = train(model("llama-2-7b"), TrainingPlan(**PLAN), gpu("v100-sxm-32gb"))
    assert answer.plan.implementation == "deepspeed"
    assert answer.peak_phase == "step"
    assert round(answer.peak_bytes / GiB, 1) == 28.2  # with one temporary, as PyTorch makes since 2.1
    assert not answer.fits
    shard = 4 * LLAMA_2_7B / 8
    assert round(shard / GiB, 2) == 3.14
    both = train(model("llama-2-7b"), TrainingPlan(**PLAN, optimizer_kernel="loop"), gpu("v100-sxm-32gb"))
    assert both.peak_bytes - answer.peak_bytes == pytest.approx(shard, abs=1024)
    assert both.peak_bytes / GiB == pytest.approx(28.28 + 3.14, abs=0.06)


def test_the_states_are_those_of_the_zero_paper_whatever_the_engine():
    """Its figure 1 shows 31.4, 16.6 and 1.9 GB for 7.5 B weights over 64 ranks: 2 + 2 + 12 / n, 2 + 14 / n and 16 / n bytes each."""
    per_weight = {1: 4 + 12 / 8, 2: 2 + 14 / 8, 3: 16 / 8}
    for zero, each in per_weight.items():
        answer = train(model("llama-2-7b"), TrainingPlan(**{**PLAN, "zero": zero}))
        states = answer.parameters_bytes + answer.gradients_bytes + answer.optimizer_bytes
        assert states == pytest.approx(each * LLAMA_2_7B, rel=1e-5)


def test_buckets_follow_the_json_and_two_are_there_where_communication_overlaps():
    sizes = {"reduce_bucket_size": 200_000_000}
    for overlap, times in ((None, 1), (False, 1), (True, 2)):
        found = Engine(ZeroSettings(2, overlap_comm=overlap, **sizes), (10**9,), 8).bytes()
        assert found.backward == times * 2 * 200_000_000
    assert Engine(ZeroSettings(3, **sizes), (10**9,), 8).bytes().always == 2 * 200_000_000
    assert Engine(ZeroSettings(2, contiguous_gradients=False), (10**9,), 8).bytes().backward == 0


def test_the_step_flattens_and_casts_the_shard_before_the_old_one_goes():
    """stage_1_and_2.py, step: the averaged gradients, their flat copy and its fp32 cast are there at once."""
    engine = Engine(ZeroSettings(2), (8_000_000,) * 100, 8)
    assert engine.bytes().step + 2 * engine.shard == (2 + 2 + 4) * engine.shard
    twice = Engine(ZeroSettings(2), (8_000_000,) * 100, 8, copies=2)
    assert twice.bytes().step + 2 * engine.shard == (4 + 8) * engine.shard


def test_stage_3_takes_a_sub_group_at_a_time():
    """stage3.py, _create_fp16_sub_groups: weights are added until their shards reach sub_group_size."""
    engine = Engine(ZeroSettings(3, sub_group_size=25), (80, 80, 80, 80, 80), 8)
    assert engine.sub_group == 30
    assert engine.bytes().step == (2 + 4) * 30


def test_weights_that_are_used_again_soon_are_not_released():
    """partitioned_param_coordinator.py: of segments of 10, 20 and 30 elements, the last are used again at once, the one before after
    its 30 in forward and 30 in backward, the first after 50 and 50."""
    kinds = ((10,), (20,), (30,))
    for distance, kept in ((1, 30), (61, 50), (101, 60)):
        settings = ZeroSettings(3, stage3_max_reuse_distance=distance, stage3_param_persistence_threshold=0)
        assert LiveParameters(settings, kinds, 2, recomputes=False).kept_bytes == 2 * kept
    assert LiveParameters(ZeroSettings(3), kinds, 1, recomputes=False).kept_bytes == 0  # one rank sees its shards


@pytest.mark.parametrize(
    "changes",
    [{}, {"zero": 1}, {"zero": 3}, {"global_batch": 16}, {"zero": 1, "global_batch": 16}, {"offload": "optimizer"},
     {"zero": 3, "offload": "parameters"}, {"method": "lora"}, {"method": "qlora", "zero": 3}],
)  # fmt: skip
def test_leaves_sum_to_the_peak_and_every_formula_is_its_value(changes):
    answer = train(model("llama-2-7b"), TrainingPlan(**{**PLAN, **changes}))
    assert answer.plan.implementation == "deepspeed"
    assert answer.breakdown.total == answer.peak_bytes
    assert_formulas_hold(answer.breakdown)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"reduce_bucket_size": 5}, "reduce_bucket_size (5) needs implementation 'deepspeed'"),
        ({"implementation": "deepspeed", "zero": 2, "dp": 2}, "recipe: 'pure-bf16' is not part of implementation 'deepspeed'"),
        ({"implementation": "deepspeed", "recipe": "mixed-16"}, "zero (0) must be 1, 2 or 3"),
        ({**PLAN, "implementation": "deepspeed", "tp": 2}, "tp (2)"),
        ({**PLAN, "sub_group_size": 5}, "need zero 3, and zero is 2"),
        ({**PLAN, "implementation": "deepspeed", "optimizer": "muon"}, "optimizer: 'muon' is not modelled"),
        ({"root_group": True}, "root_group (True) needs implementation 'torchtitan'"),
        ({"offload_activations": True}, "offload_activations is modelled with"),
        ({"optimizer_in_backward": True, "global_batch": 2}, "optimizer_in_backward is modelled on one device"),
        ({"keep_logits": True, "implementation": "liger"}, "keep_logits are modelled with implementation 'hf'"),
        ({"lora_dropout": 0.1}, "lora_dropout, adapter_format and modules_to_save need method"),
        ({"quantization": "fp4"}, "quantization and bitsandbytes need method 'qlora'"),
        ({"method": "lora", "modules_to_save": "q_proj"}, "must name the token table or the head"),
        ({"implementation": "litgpt", "recipe": "amp"}, "is not modelled with implementation 'litgpt'"),
        ({"implementation": "litgpt", "method": "lora", "lora_targets": "q_proj"}, "must be among query, key, value, projection"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_with_its_values(values, message):
    with pytest.raises(InputError) as error:
        validated(TrainingPlan, values)
    assert message in str(error.value)


def test_every_program_whose_memory_is_described_has_its_operators_timed():
    assert TIMED.keys() == PROGRAMS.keys()
