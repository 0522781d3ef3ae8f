"""Liger-Kernel's operators against what its own autograd functions keep.

`liger_traced.json` holds what Liger-Kernel 0.8.5 did on transformers 5.24: a model patched by its `apply_liger_kernel_to_...`
ran two steps under the recorder of `measure.trace`, its Triton launches answering nothing (every tensor is made around them),
its loss taking the branches of CUDA with compute capability 9.0, its norms 132 multiprocessors, its experts
the tiles of balanced tokens. Bytes, to the last one. Rows of
implementation hf have Liger-Kernel's fused loss and no other of its operators.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calc.errors import InputError
from calc.training import TrainingPlan, train
from calc.training.autograd.liger_operators import chunk_tokens
from calc.training.stage_memory import StageMemory
from tests.calc.training.models import model
from tests.latex import assert_formulas_hold

TRACED = json.loads(Path(__file__).with_name("liger_traced.json").read_text())


def predicted(row):
    return train(model(row["model"]), TrainingPlan(**row["plan"]))


def held_through_forward(row) -> int:
    """Bytes that transformers holds at most through forward besides what backward needs, and that no formula has: what the
    embedding gave, which no layer keeps where the first is frozen."""
    plan, spec = row["plan"], model(row["model"])
    return plan["micro_batch"] * plan["seq"] * (2 * spec.hidden_size + 4) if plan.get("method") == "lora" else 0


@pytest.mark.parametrize("row", TRACED, ids=lambda row: f"{row['model']} {row['plan']}")
def test_the_formula_is_liger_kernels_own_program_to_the_byte(row):
    answer, phases = predicted(row), dict(row["phases"])
    forward = phases.pop("forward")
    assert answer.activations_bytes == row["activations"]
    assert {phase: answer.phases[phase] for phase in phases} == phases
    assert 0 <= forward - answer.phases["forward"] <= held_through_forward(row)


@pytest.mark.parametrize("row", TRACED[::4], ids=lambda row: f"{row['model']} {row['plan']}")
def test_every_formula_is_its_value(row):
    assert_formulas_hold(predicted(row).breakdown)


# What each autograd function of Liger-Kernel saves of one layer of Llama-2-7B in bf16, 2 sequences of 512 tokens: bytes.
H, F, ROWS = 2 * 1024 * 4096, 2 * 1024 * 11008, 4 * 1024
LAYER = {
    "LigerRMSNormFunction: x and one fp32 number a row, twice": [H, ROWS, H, ROWS],
    "q_proj, k_proj, v_proj: the norm's output": [H],
    "LigerRopeFunction: nothing but the model's tables": [],
    "flash attention: query, key, value, output, logsumexp, seed, offset": [H, H, H, H, 4 * 32 * 1024, 512, 512],
    "gate_proj, up_proj: the norm's output": [H],
    "LigerSiLUMulFunction: gate and up": [F, F],
    "down_proj: their product": [F],
}


def layer_of(memory: StageMemory):
    return next(segment for segment in memory.segments if segment.inside)


def test_a_layer_keeps_what_the_autograd_functions_save():
    memory = train(model("llama-2-7b"), TrainingPlan(seq=512, micro_batch=2, implementation="liger")).worst
    leaves = [leaf for part in layer_of(memory).kept() for leaf in _leaves(part)]
    assert sorted(leaves) == sorted(size for sizes in LAYER.values() for size in sizes)


def _leaves(part):
    return [leaf for child in part.children for leaf in _leaves(child)] or [part.value]


def test_the_fused_loss_keeps_the_gradients_of_its_input_and_of_the_head():
    plan = TrainingPlan(seq=512, micro_batch=2, implementation="liger")
    end = train(model("llama-2-7b"), plan).worst.segments[-1]
    final_norm = [H, ROWS]
    assert sorted(leaf for part in end.kept() for leaf in _leaves(part)) == sorted([*final_norm, H, 2 * 32000 * 4096])


@pytest.mark.parametrize(
    ("tokens", "hidden_size", "vocabulary", "rows"),
    [(16384, 4096, 32000, 2048), (4096, 4096, 128256, 128), (1024, 2048, 128256, 32), (100, 4096, 4096, 100)],
)
def test_a_chunk_of_the_logits_takes_about_as_much_as_the_heads_input(tokens, hidden_size, vocabulary, rows):
    assert chunk_tokens(tokens, hidden_size, vocabulary) == rows  # the first is the source's own example


def test_liger_fuses_the_loss_unless_another_is_asked_for():
    assert TrainingPlan(implementation="liger").head_loss == "fused"
    assert TrainingPlan(implementation="liger", loss="full").head_loss == "full"
    assert TrainingPlan().head_loss == "full"


def test_a_model_without_patches_is_refused_by_name():
    with pytest.raises(InputError, match="not modelled for GPT2LMHeadModel; it is for DeepseekV2, DeepseekV3, Gemma2,"):
        train(model("gpt2"), TrainingPlan(implementation="liger"))
