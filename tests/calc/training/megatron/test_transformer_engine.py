"""Megatron's program: the moments of its backward, its buffers, and workspaces, each counted by hand."""

from __future__ import annotations

from calc.model.config import from_config
from calc.training import TrainingPlan, train
from tests.calc.training.models import model

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
