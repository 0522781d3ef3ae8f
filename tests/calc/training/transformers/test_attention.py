"""What attention allocates before its kernel, where a whole step's peak lies elsewhere: numbers a token counted from the programs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from calc.catalogue import load
from calc.model.mixers import Attention
from calc.model.weights import dim
from calc.training.autograd.blocks import OUTSIDE, Block, record
from calc.training.autograd.builder import Builder, Settings
from calc.training.autograd.tape import POSITIONS, TOKENS
from calc.training.transformers import attention as transformers
from calc.training.transformers import litgpt


def mixer_of(name: str, **changes: int) -> Attention:
    (kind,) = load(name).layers.kinds
    assert isinstance(kind.mixer, Attention)
    return replace(kind.mixer, **changes)


def block_of(program, mixer: Attention) -> Block:
    builder = Builder(Settings())
    tables = builder.tape.new("tables", dim("d", 1), POSITIONS, 2)
    builder.tape.storages.clear()
    tables.storage.number = OUTSIDE
    width = dim("h", mixer.hidden_size)
    return record(builder, (), lambda x: program(builder, x[0], mixer, tables), width, TOKENS, 2, True)


def numbers_a_token(block: Block, *names: str) -> tuple[int, ...]:
    """Of the forward pass, the size of each storage of these names, in the order of their first appearance."""
    forward = [block.storages[event] for event in block.forward if event >= 0]
    return tuple(found.dim.size for name in names for found in forward if found.name[-1] == name)


def test_litgpt_projects_all_heads_at_once_and_repeats_shared_keys_and_values_to_all_of_them():
    """litgpt 0.3.1, model.py, CausalSelfAttention: `attn` gives (heads + 2 * groups) * head_size numbers; `expand` and `reshape` copy the
    queries of a group, its key and its value to as many heads. Llama 3 8B: 32 heads, 8 groups, 128 numbers."""
    block = block_of(litgpt.attention, mixer_of("meta-llama-3-8b"))
    assert numbers_a_token(block, "query_key_value") == ((32 + 2 * 8) * 128,)
    assert numbers_a_token(block, "query", "repeated_key", "repeated_value") == (32 * 128,) * 3


def test_litgpt_copies_nothing_where_each_head_has_its_own_key():
    block = block_of(litgpt.attention, mixer_of("llama-2-7b"))
    assert numbers_a_token(block, "query_key_value") == (3 * 32 * 128,)
    assert numbers_a_token(block, "query", "repeated_key", "repeated_value") == ()


@pytest.mark.parametrize("width", [96, 64])
def test_a_joint_projection_is_as_wide_as_its_queries_keys_and_values(width):
    """modeling_phi3.py: op_size = num_attention_heads * head_dim + 2 * (num_key_value_heads * head_dim); with values of another width, of
    which no class is known, those heads times theirs. Phi 3 mini: 32 heads of 96."""
    mixer = mixer_of("phi-3-mini-4k-instruct", v_head_dim=width)
    assert mixer.modules[0] == mixer.modules[2]
    block = block_of(transformers.attention, mixer)
    assert numbers_a_token(block, "query_key_value") == (32 * 96 + 32 * 96 + 32 * width,)
