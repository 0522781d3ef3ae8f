"""torchtune's compiled layer against the graph that AOTAutograd cuts, and its head with its loss against the traced program."""

from __future__ import annotations

import pytest

from calc.model.config import from_config
from calc.training import TrainingPlan, train
from calc.training.autograd.blocks import Sizes, block_bytes, storage_bytes
from calc.training.autograd.builder import Settings
from calc.training.transformers.decoder import end_block, layer_block
from calc.training.transformers.torchtune import CHUNKS

pytestmark = pytest.mark.torch

BATCH, TOKENS = 2, 128


def spec(hidden=256, inner=768, heads=8, kv_heads=2, head=32, vocabulary=1000):
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head, "num_hidden_layers": 2,
        "vocab_size": vocabulary, "tie_word_embeddings": False,
    }  # fmt: skip
    return from_config(shape, "decoder")


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_compiled_layer_keeps_what_the_partitioner_keeps(kv_heads, recompute):
    from tests.measure.compiled_graphs import kept_by_torchtune

    settings = Settings(architecture="LlamaForCausalLM", torchtune=True, compiled=True)
    layer = spec(kv_heads=kv_heads).layers.kinds[0]
    block = layer_block(layer, ("layers",), settings, recompute, True, 2)
    kept = [block.storages[number] for number in block.kept]
    predicted = sum(
        storage_bytes(each, Sizes(BATCH, TOKENS, 1)) for each in kept if each.name[-1] not in ("seed", "offset")
    )
    assert predicted == kept_by_torchtune((256, 768, 8, kv_heads, 32), BATCH, TOKENS, recompute)


def test_the_head_with_its_chunked_losses_is_the_traced_program():
    """But for single numbers: losses and their sums."""
    from tests.measure.torchtune_program import head_and_loss

    tokens, hidden, vocabulary = 1024, 128, 32000
    settings = Settings(architecture="LlamaForCausalLM", torchtune=True)
    made = spec(hidden=hidden, vocabulary=vocabulary)
    block = end_block(made, settings, "chunked-output", False, 2, True)
    sizes = block_bytes(block, Sizes(1, tokens, 512))
    forward, backward = head_and_loss(hidden, vocabulary, tokens, CHUNKS)
    norm = 3 * 4 * tokens * hidden + 2 * 4 * tokens  # at most: what the final norm keeps
    assert sizes.forward_peak - sizes.input == pytest.approx(forward, abs=norm)
    assert sizes.backward_peak == pytest.approx(backward, abs=norm)


def test_its_options_are_those_of_its_recipes():
    plan = TrainingPlan(implementation="torchtune")
    assert (plan.head_loss, plan.recipe) == ("chunked-output", "pure-bf16")
    lora = TrainingPlan(implementation="torchtune", method="lora").lora
    assert lora is not None
    assert lora.width == 2
    for changes in ({"recipe": "amp"}, {"tp": 2}, {"zero": 2, "dp": 2}, {"loss": "fused"}, {"compile": "all"}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            TrainingPlan(implementation="torchtune", **changes)


def test_the_answer_names_its_version_and_what_compile_does_not_change():
    plan = {"implementation": "torchtune", "seq": 256, "recompute": "full"}
    remarks = [
        train(spec(), TrainingPlan(**plan, **changes)).assumptions
        for changes in ({}, {"method": "lora", "compile": "model"})
    ]
    assert all(any("torchtune 0.6.1" in note for note in notes) for notes in remarks)
    assert [any("run eagerly" in note for note in notes) for notes in remarks] == [False, True]
