"""Model families whose attention, norms or feed-forward are programs of their own: the formula against the traced program.

With the grid they make up the classes that an answer calls followed; of every other class it says that it is not.
"""

from __future__ import annotations

import pytest

from calc.catalogue import load, load_config
from calc.model.config import from_config
from calc.training import TrainingPlan, train
from calc.training.model_classes import MODEL_CLASSES
from measure.trace import TraceOptions
from tests.measure.test_training_grid import MODELS
from tests.recorded.class_configs import class_config
from tests.recorded.traces import traced

pytestmark = pytest.mark.recorded

# (model of the catalogue, what is run otherwise than in pure bf16 on 512 tokens)
CASES = [
    ("bloom-1b1", {}),
    ("bloom-1b1", {"recipe": "amp", "recompute": "full"}),
    ("falcon-7b", {}),  # one head of keys and values: plain mathematics, since a mask is always given
    ("falcon-40b", {"recompute": "full"}),
    ("falcon-7b", {"recipe": "amp", "recompute": "full"}),  # weights read through a view, which autocast does not cache
    ("falcon-40b", {"recipe": "fp32", "attention": "eager"}),
    ("opt-1.3b", {}),
    ("opt-1.3b", {"recompute": "full"}),
    ("gpt-j-6b", {}),
    ("gpt-j-6b", {"recipe": "amp", "attention": "eager"}),
    ("pythia-1b", {}),
    ("aya-23-8b", {}),
    ("aya-23-8b", {"recipe": "amp", "recompute": "full"}),
    ("stablelm-3b-4e1t", {}),
    ("starcoder2-7b", {}),
    ("gemma-7b", {}),
    ("gemma-3-4b-it", {}),  # with a tower, which a step on text gives no gradients
    ("gemma-4-26b-a4b", {}),
    ("llava-1.5-7b-hf", {}),
    ("qwen2.5-vl-3b-instruct", {}),
    ("qwen2.5-vl-3b-instruct", {"recipe": "amp", "recompute": "full"}),
    ("qwen3-vl-2b-instruct", {}),
    ("qwen3-vl-30b-a3b-instruct", {}),
    ("qwen1.5-moe-a2.7b", {}),
    ("glm-4.5-air", {}),
    ("glm-4.7-flash", {}),
    ("minimax-m2.5", {}),
    ("mimo-v2-flash", {}),
]
# Classes of which the catalogue has no model: with the sizes that the class itself takes.
BY_CLASS = [
    *("Arcee", "Cohere2", "Cwm", "Ernie4_5", "Exaone4", "Glm", "Glm4", "Granite", "Helium", "HyperCLOVAX"),
    *("Ministral3", "Phi", "SmolLM3"),
]


def _held(config, name, options):
    options = {"seq": 512, "micro_batch": 2, **options}
    attention = options.pop("attention", "auto")
    seen = traced(name, config, TraceOptions(attention=attention, **options))
    plan = TrainingPlan(attention="sdpa" if attention == "auto" else attention, **options)
    predicted = train(from_config(config, name), plan)
    assert predicted.parameters_bytes == seen.parameters_bytes
    assert predicted.gradients_bytes == seen.gradients_bytes
    assert predicted.optimizer_bytes == seen.optimizer_bytes
    assert abs(predicted.activations_bytes - seen.activations_bytes) <= 0.01 * seen.activations_bytes
    assert abs(predicted.peak_bytes - seen.peak_bytes) <= 0.02 * seen.peak_bytes
    for phase, highest in seen.phases.items():
        assert abs(predicted.phases[phase] - highest) <= 0.02 * highest, phase


@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{name}-{options}" for name, options in CASES])
def test_a_family_of_its_own_keeps_what_its_traced_program_keeps(name, options):
    _held(load_config(name), name, options)


@pytest.mark.parametrize("name", BY_CLASS)
def test_a_class_without_a_model_in_the_catalogue_keeps_what_its_traced_program_keeps(name):
    _held(class_config(f"{name}ForCausalLM"), name, {"seq": 256})


def test_the_classes_called_followed_are_those_held_here_and_in_the_grid():
    covered = {load(name).architecture for name in [*MODELS, *(name for name, _ in CASES)]}
    assert covered | {f"{name}ForCausalLM" for name in BY_CLASS} == {
        name for name, found in MODEL_CLASSES.items() if found.followed
    }


@pytest.mark.parametrize("name", ["mamba-370m-hf", "qwen3.5-27b", "deepseek-v4-pro", "t5-v1_1-xxl"])
def test_an_answer_says_that_a_program_is_not_followed_and_how_far_off_it_was(name):
    notes = train(load(name), TrainingPlan(seq=512)).assumptions
    assert any("not followed operator by operator" in remark and "% low" in remark for remark in notes)


def test_an_answer_says_nothing_of_the_kind_where_the_program_is_followed():
    notes = train(load("bloom-1b1"), TrainingPlan(seq=512)).assumptions
    assert not any("not followed" in remark for remark in notes)
