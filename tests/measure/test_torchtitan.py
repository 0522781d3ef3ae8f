"""torchtitan's formula against a plain PyTorch decoder of its structure, run with fake tensors under FSDP2: to the byte."""

from __future__ import annotations

import pytest

from calc.model.config import from_config
from calc.training import TrainingPlan, train

pytestmark = pytest.mark.torch

GROUPED = (256, 768, 8, 2, 32, 3, 1000)  # hidden, intermediate, heads, key-value heads, head size, layers, vocabulary
EQUAL = (256, 512, 8, 8, 32, 3, 64)  # so small a vocabulary that the layers, not the loss, are the highest point
WIDE = (128, 512, 4, 2, 64, 2, 32000)  # head size · heads is not the hidden size; the loss is most of it


def predicted(shape, plan):
    """The answer for the same decoder as a config."""
    hidden, intermediate, heads, kv_heads, head, layers, vocabulary = shape[:7]
    qwen = shape[7:] == (True,)
    config = {
        "architectures": ["Qwen3ForCausalLM" if qwen else "LlamaForCausalLM"],
        "model_type": "qwen3" if qwen else "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }
    options = {"implementation": "torchtitan", "recipe": "fsdp-bf16", "zero": 3, "optimizer_kernel": "fused"}
    return train(from_config(config, "decoder"), TrainingPlan(**options, **plan))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("shape", "plan"),
    [
        (GROUPED, {"seq": 512, "micro_batch": 2, "dp": 8}),
        ((*GROUPED, True), {"seq": 512, "micro_batch": 2, "dp": 8}),
        (EQUAL, {"seq": 256, "micro_batch": 3, "dp": 2}),
        (WIDE, {"seq": 1024, "micro_batch": 1, "dp": 64}),
        ((*WIDE, True), {"seq": 384, "micro_batch": 1, "dp": 4, "reshard_after_forward": False}),
        (GROUPED, {"seq": 512, "micro_batch": 2, "dp": 4, "tp": 2}),
        ((*WIDE, True), {"seq": 256, "micro_batch": 1, "dp": 8, "tp": 2}),
    ],
    ids=["grouped", "qwen3", "equal", "wide", "qwen3-whole", "tp", "qwen3-tp"],
)
def test_the_formula_is_the_traced_program_to_the_byte(shape, plan, recompute):
    from tests.measure.torchtitan_program import Shape, run

    told = predicted(shape, {**plan, "recompute": recompute})
    seen = run(
        Shape(*shape),
        plan["micro_batch"],
        plan["seq"],
        plan["dp"],
        recompute,
        plan.get("reshard_after_forward", True),
        plan.get("tp", 1),
    )
    states = told.parameters_bytes + told.optimizer_bytes
    loss = 512  # the caller's
    assert told.phases == seen.phases
    assert told.peak_bytes == max(seen.phases.values())
    assert told.activations_bytes == seen.after_forward - states
    assert told.gradients_bytes + loss == seen.after_backward - seen.before
