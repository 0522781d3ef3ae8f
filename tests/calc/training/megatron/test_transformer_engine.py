"""Megatron's program: the moments of its backward, its buffers, and workspaces, each counted by hand."""

from __future__ import annotations

import pytest

from calc.model.config import from_config
from calc.training import TrainingPlan, train
from calc.training.pipeline_stages import part_starts
from tests.calc.training.models import model
from tests.latex import assert_formulas_hold

S, H, F, A, K, D, V = 4096, 4096, 14336, 32, 8, 128, 128256  # Llama-3-8B
LAYERS, TP = 32, 4
ROW, HEAD = 8 * H + 4 * A * D + 4 * K * D + 6 * F, 2 * V * H  # kept by a layer for each token; the head's gradient
ATTENTION = H * (A + 2 * K) * D + A * D * H
WEIGHTS = ATTENTION + 3 * F * H


def megatron(**changes):
    plan = {"seq": S, "implementation": "fused", "recipe": "megatron-bf16", "optimizer_kernel": "fused"} | changes
    return train(model("meta-llama-3-8b"), TrainingPlan(**plan))


def above_the_states(answer, phase):
    return answer.phases[phase] - sum(answer.worst.states)


def test_placeholders_of_gradients_are_held_once_for_each_shape():
    leaves = {row.path: row.value for row in megatron(recompute="full").breakdown.rows()}
    assert leaves["activations/placeholder_gradients"] == 2 * WEIGHTS  # one layer's, whatever the depth
    assert "activations/placeholder_gradients" not in {
        row.path for row in megatron(recipe="pure-bf16").breakdown.rows()
    }


def test_an_expert_of_every_layer_shares_one_placeholder():
    spec = model("mixtral-8x7b-v0.1")
    plan = TrainingPlan(seq=512, implementation="fused", recipe="megatron-bf16")
    [held] = [c.leaf.value for c in train(spec, plan).worst.constants if c.leaf.name == "placeholder_gradients"]
    assert held == 2 * (ATTENTION + 3 * F * H)  # Mixtral's layer has the sizes of Llama-3-8B's


def test_backward_peaks_at_the_head_with_transformer_engines_loss():
    """Logits in 16 bits that become their gradient, the gradients of the head's weight and of its input."""
    kept = LAYERS * S * ROW + 2 * 2 * S * H + 2 * S * V
    peak = kept + HEAD + 2 * S * H + 2 * WEIGHTS
    assert above_the_states(megatron(loss="fused"), "backward") == peak


def test_megatrons_own_loss_keeps_fp32_logits_and_casts_their_gradient():
    end = megatron().worst.segments[-1].bytes
    assert end.kept == 2 * 2 * S * H + 4 * S * V
    assert end.forward_peak == end.kept + 2 * S * V
    assert end.backward_peak == end.kept + max(2 * S * V, 2 * S * V - 4 * S * V + 2 * S * H + HEAD)


def test_a_layer_peaks_where_the_activation_is_differentiated():
    end_of_layer = megatron().worst.segments[1].bytes
    assert end_of_layer.kept == S * ROW
    assert end_of_layer.backward_peak == S * ROW + 2 * S * H + 4 * S * F  # the residual's gradient, gate's and up's


def test_sequence_parallelism_gathers_for_one_layer_at_a_time():
    block = megatron(tp=TP).worst.segments[1].bytes
    between = 2 * S * H // TP
    assert block.kept == S * ROW // TP
    whole = 2 * S * H
    inside = S * ROW // TP + between + whole + 2 * S * F // TP  # fc2: its output's gradient gathered
    after = S * (ROW - 2 * F) // TP + between + (2 + 4) * S * F // TP  # the activation
    first = S * (ROW - 6 * F) // TP + between + 4 * S * F // TP + 2 * whole + between  # fc1: input and gradient whole
    assert block.backward_peak == max(inside, after, first)


def test_full_recomputation_runs_the_layer_again_next_to_its_input():
    block = megatron(recompute="full").worst.segments[1].bytes
    assert block.kept == 2 * S * H
    assert block.backward_peak == S * ROW + 2 * S * H + 4 * S * F


GPT = {
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 512,
    "n_layer": 12,
    "n_head": 8,
    "n_positions": 1024,
    "vocab_size": 50304,
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "resid_pdrop": 0.1,
}


def test_dropout_keeps_a_mask_for_each_residual_and_the_embedding():
    plan = TrainingPlan(seq=1024, micro_batch=4, implementation="fused", recipe="megatron-bf16")
    with_masks, without = (
        train(from_config(GPT), plan),
        train(from_config(GPT), plan.model_copy(update={"dropout": "off"})),
    )
    assert with_masks.activations_bytes - without.activations_bytes == (12 * 2 + 1) * 1024 * 4 * 512


# Megatron-LM, megatron/core/transformer/transformer_config.py: what each of recompute_modules drops, in features of a token
DEEPSEEK_H, HEADS, QK, V_HEAD, RANK_Q, RANK_KV, CHOSEN, EXPERT, SHARED = 7168, 128, 192, 128, 1536, 512, 8, 2048, 2048
DROPPED = {
    "core_attn": 0,  # flash attention keeps its operands and its output
    "layernorm": 2 * DEEPSEEK_H,  # both norms' outputs
    "mla_up_proj": HEADS * (2 * QK + V_HEAD) + RANK_Q + RANK_KV,  # queries, keys, values and the normalised latents
    "moe_act": CHOSEN * EXPERT,  # the input of the experts' last projection
    "shared_experts": 3 * SHARED,
    "moe": CHOSEN * (2 * DEEPSEEK_H + 3 * EXPERT) + 3 * SHARED,
}


def deepseek(**changes):
    shape = {"pp": 16, "ep": 32, "dp": 64, "zero": 1, "global_batch": 1024, "seq": S}
    plan = {"implementation": "fused", "recipe": "megatron-bf16", "optimizer_kernel": "fused"}
    return train(model("deepseek-v3"), TrainingPlan(**shape, **plan, **changes))


@pytest.mark.parametrize(("module", "features"), DROPPED.items())
def test_a_recomputed_module_drops_its_rows_and_makes_them_again_in_backward(module, features):
    whole, found = deepseek().worst.segments[-1], deepseek(recompute_modules=module).worst.segments[-1]
    assert whole.bytes.kept - found.bytes.kept == 2 * S * features
    # as high as before at most: when the module has run again, the others' rows that came after it are gone
    assert whole.bytes.backward_peak - 2 * S * features <= found.bytes.backward_peak <= whole.bytes.backward_peak


def test_recomputed_modules_add_up_and_their_leaves_sum():
    found = deepseek(recompute_modules="mla_up_proj,layernorm,moe_act")
    dropped = sum(2 * S * DROPPED[name] for name in ("mla_up_proj", "layernorm", "moe_act"))
    assert deepseek().worst.segments[-1].bytes.kept - found.worst.segments[-1].bytes.kept == dropped
    assert found.breakdown.total == found.peak_bytes
    assert_formulas_hold(found.breakdown)


def test_a_recomputed_mlp_keeps_its_input_alone_and_backward_is_as_high():
    whole, found = (megatron(**each).worst.segments[5].bytes for each in ({}, {"recompute_modules": "mlp"}))
    assert whole.kept - found.kept == 6 * F * S
    assert found.backward_peak == whole.backward_peak


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"recompute_modules": "attention"}, "recompute_modules"),
        ({"recompute_modules": "mlp", "recompute": "full"}, "recompute_modules"),
        ({"recompute_modules": "mlp", "implementation": "hf", "recipe": "pure-bf16"}, "recompute_modules"),
        ({"recompute_modules": "moe_act"}, "recompute_modules"),
        ({"first_stage_layers": 3}, "first_stage_layers"),
        ({"pp": 4, "first_stage_layers": 3}, "first_stage_layers"),
        ({"pp": 4, "first_stage_layers": 30, "last_stage_layers": 4}, "first_stage_layers"),
        ({"pp": 4, "first_stage_layers": 8, "virtual_stages": 3, "schedule": "interleaved"}, "first_stage_layers"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, field):
    with pytest.raises(ValueError, match=field):
        megatron(global_batch=16, **changes)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"first_stage_layers": 5, "last_stage_layers": 3}, [5, 12, 12, 3]),
        ({"first_stage_layers": 2}, [2, 10, 10, 10]),
        ({"last_stage_layers": 5}, [9, 9, 9, 5]),
        ({"first_stage_layers": 8, "last_stage_layers": 0}, [8, 12, 12, 0]),
        (
            {"first_stage_layers": 6, "last_stage_layers": 2, "virtual_stages": 2, "schedule": "interleaved"},
            [6, 12, 12, 2],
        ),
    ],
)
def test_the_first_and_the_last_stage_have_layers_of_their_own_number(changes, layers):
    answer = megatron(pp=4, global_batch=16, **changes)
    assert [len(stage.stage.layers) for stage in answer.stages] == layers


def test_a_pipeline_with_two_parts_a_rank_deals_them_out_in_order_of_depth():
    plan = TrainingPlan(
        pp=4, virtual_stages=2, schedule="interleaved", first_stage_layers=6, last_stage_layers=2, global_batch=16
    )
    assert part_starts(plan, 32) == (0, 3, 9, 15, 16, 19, 25, 31, 32)
    with pytest.raises(ValueError, match="schedule"):
        part_starts(plan.model_copy(update={"schedule": "zb-v"}), 32)
