"""torchtitan's formula against a plain PyTorch decoder of its structure, run with fake tensors under FSDP2: to the byte."""

from __future__ import annotations

import pytest

from calc.model.config import from_config
from calc.training import TrainingPlan, train
from calc.training.autograd.blocks import Sizes, block_bytes
from calc.training.autograd.builder import Settings
from calc.training.torchtitan.losses import CHUNKS, chunked_loss_block

pytestmark = pytest.mark.torch

GROUPED = (256, 768, 8, 2, 32, 3, 1000)  # hidden, intermediate, heads, key-value heads, head size, layers, vocabulary
EQUAL = (256, 512, 8, 8, 32, 3, 64)  # so small a vocabulary that the layers, not the loss, are the highest point
WIDE = (128, 512, 4, 2, 64, 2, 32000)  # head size · heads is not the hidden size; the loss is most of it


QWEN = (256, 768, 8, 2, 32, 2, 1000, True)
DEEPSEEK = (256, 768, 8, 8, 48, 3, 1000, False)


def config(shape):
    """The same decoder as a config of transformers, which the formula reads."""
    made = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "num_hidden_layers": shape.layers,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": False,
        "num_experts_per_tok": shape.experts.chosen if shape.experts else None,
        "moe_intermediate_size": shape.experts.width if shape.experts else None,
    }
    if shape.latent:
        latent, experts = shape.latent, shape.experts
        kind = "3" if experts.normalised else "2"
        return made | {
            "architectures": [f"DeepseekV{kind}ForCausalLM"],
            "model_type": f"deepseek_v{kind}",
            "q_lora_rank": latent.query_rank or None,
            "kv_lora_rank": latent.rank,
            "qk_nope_head_dim": latent.nope,
            "qk_rope_head_dim": latent.rope,
            "v_head_dim": latent.value,
            "n_routed_experts": experts.count,
            "n_shared_experts": experts.shared // experts.width,
            "first_k_dense_replace": experts.dense,
            "n_group": 1,
            "topk_group": 1,
        }
    if shape.experts:
        names = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": shape.experts.count,
        }
        return made | names | {"head_dim": shape.head, "mlp_only_layers": [], "decoder_sparse_step": 1}
    name = "Qwen3ForCausalLM" if shape.cosines else "LlamaForCausalLM"
    made = {key: value for key, value in made.items() if value is not None}
    return made | {"architectures": [name], "model_type": "qwen3" if shape.cosines else "llama", "head_dim": shape.head}


def both(shape, plan):
    """The answer, and what was seen."""
    from tests.measure.torchtitan_program import run

    options = {"implementation": "torchtitan", "recipe": "fsdp-bf16", "zero": 3, "optimizer_kernel": "fused"}
    predicted = train(from_config(config(shape), "decoder"), TrainingPlan(**options, **plan))
    whole, every = plan.get("reshard_after_forward", True), plan.get("recompute_every", 1)
    parts = CHUNKS if plan.get("loss") == "chunked-output" else 1
    sizes = plan["micro_batch"], plan["seq"], plan["dp"]
    seen = run(shape, *sizes, plan["recompute"], whole, plan.get("tp", 1), every, parts)
    return predicted, seen


CASES = {
    "grouped": (GROUPED, {"seq": 512, "micro_batch": 2, "dp": 8}, ("none", "selective", "full")),
    "qwen3": ((*GROUPED, True), {"seq": 512, "micro_batch": 2, "dp": 8}, ("selective", "full")),
    "layers highest": (EQUAL, {"seq": 256, "micro_batch": 3, "dp": 2}, ("selective", "full")),
    "loss highest": (WIDE, {"seq": 1024, "micro_batch": 1, "dp": 64}, ("selective",)),
    "kept whole": (
        (*WIDE, True),
        {"seq": 384, "micro_batch": 1, "dp": 4, "reshard_after_forward": False},
        ("none", "full"),
    ),
    "every second layer": (GROUPED, {"seq": 512, "micro_batch": 2, "dp": 8, "recompute_every": 2}, ("full",)),
    "chunks of the logits": (
        WIDE,
        {"seq": 1024, "micro_batch": 1, "dp": 8, "loss": "chunked-output"},
        ("none", "full"),
    ),
    "tp": (GROUPED, {"seq": 512, "micro_batch": 2, "dp": 4, "tp": 2}, ("none", "selective", "full")),
    "qwen3 tp": ((*WIDE, True), {"seq": 256, "micro_batch": 1, "dp": 8, "tp": 2}, ("selective",)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("shape", "plan"),
    [
        pytest.param(shape, {**plan, "recompute": level}, id=f"{name} {level}")
        for name, (shape, plan, levels) in CASES.items()
        for level in levels
    ],
)
def test_the_formula_is_the_traced_program_to_the_byte(shape, plan):
    from tests.measure.torchtitan_program import Shape

    predicted, seen = both(Shape(*shape), plan)
    states = predicted.parameters_bytes + predicted.optimizer_bytes
    loss = 512  # the caller's
    assert predicted.phases == seen.phases
    assert predicted.peak_bytes == max(seen.phases.values())
    assert predicted.activations_bytes == seen.after_forward - states
    assert predicted.gradients_bytes + loss == seen.after_backward - seen.before


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "recompute"),
    [("qwen3-moe", "none"), ("qwen3-moe", "selective"), ("deepseek-v2", "selective"), ("deepseek-v3", "full")],
)
def test_experts_differ_from_the_traced_program_by_the_row_of_zeros_that_padding_reads(name, recompute):
    from tests.measure.torchtitan_program import Experts, Latent, Shape

    shape = {
        "qwen3-moe": Shape(*QWEN, experts=Experts(16, 4, 128, normalised=True)),
        "deepseek-v2": Shape(*DEEPSEEK, Latent(0, 64, 32, 16, 32), Experts(16, 4, 128, 256, dense=1)),
        "deepseek-v3": Shape(*DEEPSEEK, Latent(96, 64, 32, 16, 32), Experts(16, 4, 128, 128, True, 1)),
    }[name]
    predicted, seen = both(shape, {"seq": 512, "micro_batch": 2, "dp": 8, "recompute": recompute})
    row = 2 * shape.hidden
    assert predicted.phases["step"] == seen.phases["step"]
    assert seen.phases["forward"] - predicted.phases["forward"] == row
    assert seen.phases["backward"] - predicted.phases["backward"] == (0 if recompute == "none" else row)
    assert predicted.activations_bytes == seen.after_forward - predicted.parameters_bytes - predicted.optimizer_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("name", "dp", "ep", "count"),
    [("qwen3-moe", 8, 4, 16), ("deepseek-v2", 8, 8, 16), ("qwen3-moe", 32, 4, 16), ("deepseek-v2", 8, 4, 8)],
)
def test_expert_parallelism_is_the_traced_program(name, dp, ep, count, recompute):
    """To the byte, but for forward's highest point, where a layer's experts are counted on to the layer's end: shards of whole experts, of
    none (one rank holds them), and of each expert's rows."""
    from tests.measure.torchtitan_program import Experts, Latent, Shape

    shape = {
        "qwen3-moe": Shape(*QWEN, experts=Experts(count, 4, 128, normalised=True, ep=ep)),
        "deepseek-v2": Shape(*DEEPSEEK, Latent(0, 64, 32, 16, 32), Experts(count, 4, 128, 256, dense=1, ep=ep)),
    }[name]
    told, seen = both(shape, {"seq": 512, "micro_batch": 2, "dp": dp, "ep": ep, "recompute": recompute})
    experts = 2 * 3 * (count // ep) * 128 * shape.hidden
    assert (told.phases["backward"], told.phases["step"]) == (seen.phases["backward"], seen.phases["step"])
    assert 0 <= told.phases["forward"] - seen.phases["forward"] <= (0 if recompute == "none" else experts)
    assert told.activations_bytes == seen.after_forward - told.parameters_bytes - told.optimizer_bytes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_outputs_of_experts_that_are_added_are_the_traced_program(recompute):
    """Before November 2025, where the experts' own layer is the highest point: at most their weights, counted to the layer's end, more."""
    from tests.measure.torchtitan_program import Experts, Latent, Shape

    shape = Shape(
        *DEEPSEEK[:6], 64, False, Latent(0, 64, 32, 16, 32), Experts(16, 4, 128, 256, dense=1, ep=4, added=True)
    )
    plan = {"seq": 512, "micro_batch": 2, "dp": 8, "ep": 4, "recompute": recompute, "experts_of": "2025-09"}
    told, seen = both(shape, plan)
    experts = 2 * 3 * 4 * 128 * shape.hidden
    assert told.phases["step"] == seen.phases["step"]
    for phase in ("forward", "backward"):
        assert -512 <= told.phases[phase] - seen.phases[phase] <= experts
    assert told.activations_bytes == seen.after_forward - told.parameters_bytes - told.optimizer_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_pipeline_stage_is_the_traced_one(place, recompute):
    """First, middle and last of three, with seven layers dealt as 2, 3 and 2; within a few scalars of 512 bytes."""
    from tests.measure.torchtitan_pipeline import peak
    from tests.measure.torchtitan_program import Shape

    shape, micro = Shape(*GROUPED[:5], 7, 1000), 4
    plan = {"seq": 512, "micro_batch": 1, "global_batch": 4 * micro, "dp": 4, "pp": 3, "recompute": recompute}
    options = {"implementation": "torchtitan", "recipe": "fsdp-bf16", "zero": 3, "optimizer_kernel": "fused"}
    told = train(from_config(config(shape), "decoder"), TrainingPlan(**options, **plan)).stages
    assert [len(memory.stage.layers) for memory in told] == [2, 3, 2]
    seen = peak(shape, (2, 3, 2), place, 512, micro, 4, recompute == "full")
    assert abs(told[place].peak[1].bytes - seen) <= 4 * 512


def test_the_loss_that_runs_the_head_chunk_by_chunk_is_the_traced_program_to_the_byte():
    from tests.measure.torchtitan_program import Shape, chunked_loss

    tokens, shape = 1024, Shape(*WIDE)
    spec = from_config(config(shape), "decoder")
    made = block_bytes(chunked_loss_block(spec, Settings()), Sizes(1, tokens, 512))
    assert made.forward_peak - made.input == chunked_loss(shape.hidden, shape.vocabulary, tokens, CHUNKS)
