"""LoRA's trainable parameters equal what peft trains, "all-linear" and named, on experts in one tensor and next to a vision encoder."""

from __future__ import annotations

from typing import Any

import pytest

from calc.catalogue import load, load_config
from calc.errors import InputError
from calc.lora import lora_parameters
from calc.model.config import from_config
from calc.training import TrainingPlan, train
from tests.calc.model.meta_model import build
from tests.calc.model.reference_class import TWINS
from tests.calc.model.test_multimodal import CASES
from tests.calc.model.test_state_against_transformers import EXPERTS, FAMILIES, LATENT, SIZES

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

RANK = 8
# further classes whose experts peft takes by their old names
STACKED = dict.fromkeys(("AfmoeForCausalLM", "Dots1ForCausalLM", "FlexOlmoForCausalLM", "OlmoeForCausalLM"), EXPERTS)
STACKED |= dict.fromkeys(("Ernie4_5_MoeForCausalLM", "ExaoneMoeForCausalLM", "SolarOpenForCausalLM"), EXPERTS)
STACKED |= dict.fromkeys(("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "Glm4MoeLiteForCausalLM"), EXPERTS | LATENT)
OTHERS: dict[str, dict[str, Any]] = {"CodeGenForCausalLM": {}, "BertLMHeadModel": {}, "RobertaForCausalLM": {}}
TINY = STACKED | OTHERS | FAMILIES


def _config(name: str) -> dict[str, Any]:
    import transformers

    fields = {key: value for key, value in (SIZES | TINY[name]).items() if value is not None}
    config: dict[str, Any] = getattr(transformers, name).config_class(**fields).to_dict()
    return config | {"architectures": [name]}


def _peft(name: str, config: dict[str, Any], targets: str | None) -> int:
    """The parameters that train once peft has put its adapters; ValueError where it refuses."""
    from peft import LoraConfig, get_peft_model

    chosen = targets if targets in (None, "all-linear") else targets.split(",")
    model = get_peft_model(build(name, config), LoraConfig(r=RANK, target_modules=chosen), low_cpu_mem_usage=True)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _ours(config: dict[str, Any], targets: str) -> int | None:
    """Our count, None where it is refused."""
    try:
        return lora_parameters(from_config(config), RANK, targets)
    except InputError:
        return None


def test_adapters_on_every_linear_layer_are_those_of_peft_or_refused():
    wrong, refused, exact = [], [], 0
    for name in TINY:
        config = _config(name)
        ours = _ours(config, "all-linear")
        try:
            theirs = _peft(name, config, "all-linear")
        except ValueError:  # peft puts none on a Mamba layer's output
            theirs = None
        if ours is None:
            refused.append(name)
        elif ours == theirs:
            exact += 1
        else:
            wrong.append((name, ours, theirs))
    assert wrong == []
    assert exact >= 45
    assert set(refused) <= {
        *("MambaForCausalLM", "Mamba2ForCausalLM", "NemotronHForCausalLM", "FalconH1ForCausalLM"),
        *("LongcatFlashForCausalLM", "JetMoeForCausalLM", "AXK2ForCausalLM", "ZambaForCausalLM", "Zamba2ForCausalLM"),
    }


@pytest.mark.parametrize("case", CASES)
def test_an_encoder_next_to_the_language_model_gets_adapters_too(case):
    name, config = CASES[case]
    config = {"architectures": [name], **config}
    assert _ours(config, "all-linear") == _peft(name, config, "all-linear")


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("MixtralForCausalLM", "q_proj,w1,w2,w3"),
        ("MixtralForCausalLM", "q_proj,gate"),
        ("Qwen3MoeForCausalLM", "gate_proj,up_proj"),
        ("Qwen3MoeForCausalLM", "gate_proj,up_proj,down_proj,v_proj"),
        ("DeepseekV3ForCausalLM", "down_proj,q_b_proj"),
        ("Glm4MoeForCausalLM", "gate_proj,up_proj,down_proj"),
        ("LlamaForCausalLM", "gate_proj,up_proj,down_proj"),
    ],
)
def test_named_targets_reach_the_experts_that_peft_reaches(name, targets):
    config = _config(name)
    assert _ours(config, targets) == _peft(name, config, targets)


def test_half_of_a_joined_tensor_is_refused_as_peft_refuses_it():
    config = _config("Qwen3MoeForCausalLM")
    with pytest.raises(ValueError, match="without also targeting up_proj"):
        _peft("Qwen3MoeForCausalLM", config, "gate_proj")
    with pytest.raises(InputError, match="up_proj must be named with it"):
        lora_parameters(from_config(config), RANK, "gate_proj")


def test_named_targets_reach_the_encoder_of_a_model_that_sees():
    name, config = CASES["gemma 2's text, tied by the text's own flag"]
    config = {"architectures": [name], **config}
    assert _ours(config, "q_proj,v_proj") == _peft(name, config, "q_proj,v_proj")


def test_the_adapters_that_phi_2_gets_without_a_choice_are_those_of_peft():
    class_name, fields = TWINS["phi-2"]
    theirs = _peft(class_name, load_config("phi-2") | fields, None)
    assert theirs == lora_parameters(load("phi-2"), RANK, "q_proj,v_proj,fc1,fc2")
    answer = train(load("phi-2"), TrainingPlan(method="lora", lora_rank=RANK))
    assert answer.as_json()["gradients_bytes"] == 4 * theirs  # adapters train in fp32


def test_layers_that_share_keys_have_adapters_on_what_they_hold_themselves():
    spec = load("gemma-3n-e2b-it")
    plan = TrainingPlan(method="lora", lora_rank=RANK, lora_targets="q_proj,k_proj")
    h, keys = spec.hidden_size, 2 * 256
    expected = 30 * RANK * (h + h) + 20 * RANK * (h + keys)
    assert lora_parameters(spec, RANK, "q_proj,k_proj") >= expected  # the audio encoder's too
    assert train(spec, plan).as_json()["gradients_bytes"] == 4 * expected
