"""The predicted shards and peak of FSDP2 against the traced program (see tests/recorded)."""

import pytest

from calc.catalogue import load_config
from calc.model.config import from_config
from calc.training import TrainingPlan, train
from measure.trace import TraceOptions
from tests.recorded.traces import traced

pytestmark = pytest.mark.recorded


def cut_to(name, layers):
    """The catalogue's config with fewer layers; all else is as published."""
    return {**load_config(name), "num_hidden_layers": layers}


MODELS = {"llama-2-7b": 4, "qwen3-0.6b": 3, "mixtral-8x7b-v0.1": 3}
GRID = [(name, ranks, True) for name in MODELS for ranks in (2, 8, 64)]
GRID += [("llama-2-7b", 8, False)]


def test_the_predicted_shards_and_peak_are_those_of_the_traced_program():
    print(f"\n{'model':<20}{'ranks':>6} {'reshard':<8}{'predicted peak':>16}{'traced peak':>16}{'error':>9}")
    for name, ranks, reshard in GRID:
        config = cut_to(name, MODELS[name])
        asked = {"seq": 1024, "dp": ranks, "zero": 3, "recipe": "fsdp-bf16", "reshard_after_forward": reshard}
        predicted = train(from_config(config, name), TrainingPlan(**asked))
        seen = traced(f"{name} of {MODELS[name]} layers", config, TraceOptions(**asked))
        error = (predicted.peak_bytes - seen.peak_bytes) / seen.peak_bytes
        print(f"{name:<20}{ranks:>6} {reshard!s:<8}{predicted.peak_bytes:>16,}{seen.peak_bytes:>16,}{error:>9.3%}")
        for state in ("parameters_bytes", "gradients_bytes", "optimizer_bytes"):
            assert getattr(predicted, state) == getattr(seen, state), (name, ranks, state)
        assert predicted.peak_phase == seen.peak_phase
        assert predicted.peak_bytes == seen.peak_bytes
        assert abs(predicted.activations_bytes - seen.activations_bytes) <= 512  # one label more (a single sequence)
