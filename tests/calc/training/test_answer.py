"""The answer as a whole: keys, sums, formulas, stages, overhead, and every model of the catalogue."""

from __future__ import annotations

import json

import pytest

from calc.catalogue import catalogue
from calc.errors import InputError
from calc.hardware import gpu
from calc.training import TrainingPlan, train
from calc.training.states.tensors import has_peft_targets, linear_modules
from calc.units import GiB, MiB
from tests.calc.training.models import model
from tests.latex import assert_formulas_hold
from tests.offenders import each
from tests.recorded.recording import drawn

PLANS = (
    {},
    {"implementation": "fused", "recipe": "megatron-bf16", "recompute": "full"},
    {"implementation": "paper", "recompute": "selective"},
    {"recipe": "amp", "recompute": "full", "micro_batch": 3},
    {"attention": "eager", "optimizer": "adamw-8bit", "global_batch": 4},
    {"zero": 3, "dp": 8, "recipe": "fsdp-bf16", "optimizer": "muon"},
    {"method": "lora"},
    {"method": "dora", "recompute": "full"},
    {"optimizer_kernel": "fused", "tp": 1},
    {"loss": "chunked", "zero": 2, "dp": 3, "optimizer": "adafactor"},
)
KEYS = (
    "peak_bytes peak_phase phases parameters_bytes gradients_bytes optimizer_bytes activations_bytes overhead_bytes "
    "reserved_bytes driver_bytes gpu_memory_bytes fits headroom_bytes stages components assumptions"
).split()


@each(catalogue())
def test_every_model_of_the_catalogue_is_answered_and_its_leaves_sum_to_the_peak(name):
    spec = model(name)
    seq = min(256, spec.max_position_embeddings or 256)
    for changes in drawn(PLANS, 4):
        if "method" in changes and not has_peft_targets(spec):
            _, module = next(iter(linear_modules(spec.layers.kind_parts[0])))
            changes = changes | {"lora_targets": (module,)}
        values = {"seq": seq, **changes}
        answer = train(spec, TrainingPlan.model_validate(values))
        assert answer.breakdown.total == answer.peak_bytes, changes
        paths = [row.path for row in answer.breakdown.rows()]
        assert len(paths) == len(set(paths)), changes
        assert_formulas_hold(answer.breakdown)


def test_the_json_has_the_keys_of_the_command_line_and_exact_integers():
    answer = train(model("llama-2-7b"), TrainingPlan(seq=1024), gpu("h100-sxm-80gb")).as_json()
    assert set(KEYS) <= set(answer)
    assert json.loads(json.dumps(answer)) == answer
    assert sum(part["value"] for part in answer["components"]) == answer["peak_bytes"]
    assert answer["peak_bytes"] == max(answer["phases"].values()) == answer["phases"][answer["peak_phase"]]


def test_what_the_driver_counts_is_compared_with_what_it_shows():
    card = gpu("h100-sxm-80gb")
    answer = train(model("llama-2-7b"), TrainingPlan(seq=1024), card)
    lines = answer.overhead
    assert answer.reserved_bytes == answer.peak_bytes + lines.workspace + lines.fragmentation
    assert answer.driver_bytes == answer.reserved_bytes + lines.context + lines.nccl
    assert answer.headroom_bytes == card.memory_bytes - answer.driver_bytes
    assert answer.fits == (answer.driver_bytes <= card.memory_bytes)
    assert train(model("llama-2-7b"), TrainingPlan(seq=1024)).fits is None


def test_each_line_of_the_overhead_can_be_set():
    plan = TrainingPlan(seq=1024, context_mib=1, nccl_mib=2, workspace_mib=3, fragmentation_percent=0)
    assert train(model("llama-2-7b"), plan).overhead == (MiB, 2 * MiB, 3 * MiB, 0)


def test_each_process_group_costs_a_communicator():
    plans = {"dp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}
    found = [train(model("llama-2-7b"), TrainingPlan(seq=1024, **plan)).overhead.nccl for plan in plans]
    assert found == [544 * MiB, 688 * MiB, 2 * 544 * MiB]


def test_the_embedding_is_on_the_first_stage_and_the_head_on_the_last():
    answer = train(model("llama-2-7b"), TrainingPlan(seq=1024, pp=4, global_batch=8))
    first, middle, _, last = answer.stages
    layers = 8 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    assert first.states[0] == 2 * (layers + 32000 * 4096)
    assert middle.states[0] == 2 * layers
    assert last.states[0] == 2 * (layers + 4096 + 32000 * 4096)
    assert [stage.stage.chunks for stage in answer.stages] == [4, 3, 2, 1]


def test_a_tied_head_is_held_again_on_the_last_stage():
    spec = model("qwen3-0.6b")
    one = train(spec, TrainingPlan(seq=512)).parameters_bytes
    stages = train(spec, TrainingPlan(seq=512, pp=2, global_batch=4)).stages
    assert sum(stage.states[0] for stage in stages) == one + 2 * 151936 * 1024


def test_gradients_of_earlier_micro_batches_stay_through_forward():
    spec = model("llama-2-7b")
    one = train(spec, TrainingPlan(seq=1024)).phases["forward"]
    two = train(spec, TrainingPlan(seq=1024, global_batch=2)).phases["forward"]
    assert two - one == 2 * 6_738_415_616


def test_gathered_groups_stand_next_to_the_shards():
    spec = model("meta-llama-3-8b")
    answer = train(spec, TrainingPlan(seq=8192, dp=8, zero=3, recipe="fsdp-bf16"))
    assert answer.parameters_bytes == 4 * 8_030_261_248 // 8
    root = 2 * (2 * 128256 * 4096 + 4096)
    assert answer.worst.full_weights.kept_bytes == root
    assert answer.activations_bytes > root
    kept = train(spec, TrainingPlan(seq=8192, dp=8, zero=3, recipe="fsdp-bf16", reshard_after_forward=False))
    assert kept.worst.full_weights.kept_bytes == 2 * 8_030_261_248


def test_pipedream_keeps_a_version_of_the_weights_for_each_micro_batch_in_flight():
    plan = TrainingPlan(seq=512, pp=4, global_batch=8, schedule="pipedream")
    whole = train(model("llama-2-7b"), TrainingPlan(seq=512, pp=4, global_batch=8))
    found = train(model("llama-2-7b"), plan)
    for versions, stage, plain in zip((4, 3, 2, 1), found.stages, whole.stages, strict=True):
        assert stage.states[0] == versions * plain.states[0]


def test_a_7b_model_in_mixed_precision_needs_more_than_one_80_gib_card():
    answer = train(model("llama-2-7b"), TrainingPlan(seq=4096, recipe="amp"), gpu("a100-sxm-80gb"))
    assert answer.parameters_bytes + answer.gradients_bytes + answer.optimizer_bytes == 16 * 6_738_415_616
    assert answer.peak_bytes > 80 * GiB
    assert answer.fits is False


def test_what_is_assumed_is_told():
    notes = train(model("qwen3-vl-2b-instruct"), TrainingPlan(seq=512)).assumptions
    assert any("text-only step" in line for line in notes)
    assert any("CUDA context" in line for line in notes)
    notes = train(model("gemma-2-2b"), TrainingPlan(seq=512)).assumptions
    assert any("eager" in line for line in notes)


def test_a_recipe_whose_format_the_gpu_lacks_is_told():
    def notes(name, recipe):
        return [
            line for line in train(model("gpt2"), TrainingPlan(recipe=recipe), gpu(name)).assumptions if recipe in line
        ]

    assert notes("v100-sxm-32gb", "pure-bf16") == [
        "recipe pure-bf16: bf16 needs compute capability 8.0; v100-sxm-32gb has 7.0"
    ]
    assert notes("h100-sxm-80gb", "pure-bf16") == notes("v100-sxm-32gb", "mixed-16") == []


def test_ddp_holds_every_gradient_a_second_time_in_its_buckets():
    spec = model("llama-2-7b")
    alone, ddp, zero1, zero2 = (
        train(spec, TrainingPlan(seq=512, dp=dp, zero=zero)) for dp, zero in ((1, 0), (8, 0), (8, 1), (8, 2))
    )
    gradients = 2 * 6_738_415_616  # 13,476,831,232 bytes on each rank, as real gloo ranks show
    assert ddp.peak_bytes - alone.peak_bytes == gradients
    assert [answer.worst.ddp_buckets for answer in (alone, ddp, zero1, zero2)] == [0, gradients, gradients, 0]
    fused = TrainingPlan(seq=512, dp=8, implementation="fused", recipe="megatron-bf16")
    assert train(spec, fused).worst.ddp_buckets == 0  # Megatron's main gradients are its buckets


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("bloom-3b", {}, "runs this model's attention eager (its class has no SDPA)"),
        ("gemma-2-9b", {}, "runs this model's attention eager (capped scores or sinks have no SDPA)"),
        ("falcon-7b", {}, "plain mathematics keeps all scores in fp32"),
        ("mixtral-8x7b-v0.1", {"zero": 3, "dp": 16}, "8 over 16 ranks are padded to one each"),
        ("mixtral-8x7b-v0.1", {"zero": 3, "dp": 16, "ep": 2}, "4 over 8 ranks are padded to one each"),
        ("mixtral-8x7b-v0.1", {"zero": 3, "dp": 16, "ep": 4}, "2 over 4 ranks are padded"),
        ("mixtral-8x7b-v0.1", {"zero": 3, "dp": 8}, None),
        ("llama-2-7b", {"recipe": "fsdp-bf16"}, "with zero 0 no 16-bit copy of the fp32 weights is counted"),
        ("llama-2-7b", {"recipe": "fsdp-bf16", "zero": 3, "dp": 8}, None),
        ("falcon-40b", {}, None),
        ("falcon-7b", {"attention": "eager"}, None),
    ],
)
def test_what_a_layout_or_an_attention_program_really_does_is_told_where_it_is_so(name, values, says):
    notes = train(model(name), TrainingPlan(seq=256, **values)).assumptions
    kinds = ("runs this model's attention eager", "plain mathematics", "are padded to one", "no 16-bit copy")
    found = [text for text in notes if any(kind in text for kind in kinds)]
    assert len(found) == (says is not None)
    assert all(says in text for text in found)


def test_padding_of_stacked_experts_grows_with_the_ranks_beyond_them():
    few, many = (train(model("mixtral-8x7b-v0.1"), TrainingPlan(seq=256, zero=3, dp=dp)).peak_bytes for dp in (8, 16))
    assert many > few


def test_flash_is_refused_where_a_class_runs_eager_alone():
    with pytest.raises(InputError, match="BloomForCausalLM has eager attention alone"):
        train(model("bloom-3b"), TrainingPlan(seq=256, attention="flash"))
