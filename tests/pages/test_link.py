"""Links without a browser: what is written is read again, old links keep their figures, nonsense is named."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs, urlencode

import pytest

from calc.catalogue import load, load_config
from calc.commands import COMMANDS
from calc.hardware import gpu
from calc.serving import ServingPlan, serve
from calc.training import TrainingPlan, train
from pages.ui.link import parameters, read
from pages.ui.scenario import START, Scenario

PLANS = [command.plan for command in COMMANDS.values()]
TRAIN, SERVE = COMMANDS["train"].plan, COMMANDS["serve"].plan


def read_text(query: str) -> Any:
    return read(parse_qs(query, keep_blank_values=True), [TRAIN, SERVE, *PLANS])


def again(scenario: Scenario, plan: Any = TRAIN, pins: tuple[Scenario, ...] = ()) -> Any:
    return read(parse_qs(urlencode(parameters(scenario, (plan,), pins), doseq=True)), [plan])


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"model": "qwen3-30b-a3b", "gpu": "rtx-4090-24gb", "seq": 8192},
        {"recipe": "pure-bf16", "recompute": "none", "optimizer_kernel": "foreach"},
        {"layout": "by hand", "tp": 2, "dp": 4, "zero": 1, "sequence_parallel": False},
        {"gpus": 64, "lora_targets": ("q_proj", "v_proj"), "method": "lora"},
    ],
)
def test_a_link_brings_its_scenario_back(values):
    scenario = Scenario(values)
    found = again(scenario)
    assert found.complaints == []
    assert found.scenario.of(TRAIN) == scenario.of(TRAIN)
    assert found.scenario.subject == scenario.subject


def test_a_link_brings_its_pins_back_and_a_bad_one_does_not_spoil_the_others():
    pins = (Scenario({"seq": 512, "gpus": 8}), Scenario({"model": "gpt2", "method": "qlora"}))
    found = again(Scenario({}), pins=pins)
    assert [pin.of(TRAIN) for pin in found.pins] == [pin.of(TRAIN) for pin in pins]
    spoilt = read_text("v=2&model=gpt2&pin=seq%3Dbanana%26model%3Dgpt2&pin=seq%3D512")
    assert [pin.of(TRAIN).seq for pin in spoilt.pins] == [4096, 512]
    assert len(spoilt.complaints) == 1
    assert spoilt.complaints[0].startswith("pin: seq: 'banana' is not allowed")


def test_a_config_of_ones_own_travels_in_the_link():
    config = json.dumps(load_config("llama-2-7b"))
    scenario = Scenario({"model": "custom", "config": config})
    assert again(scenario).scenario.config == config
    long = Scenario({"model": "custom", "config": json.dumps([{"a": n * 7919 % 104729} for n in range(5000)])})
    assert "config" not in parameters(long, (TRAIN,))


@pytest.mark.parametrize("packed", ["!!!", "AAAA", "eJyrVkpUslIyBAAJ", "x" * 5000])
def test_a_config_that_no_link_of_this_app_holds_is_said(packed):
    found = read_text(f"v=2&model=custom&config={packed}")
    assert [each.partition(":")[0] for each in found.complaints] == ["config"]


# links of the first app, which had no version: the model, the GPU and the plan whose figures they showed
OLD_TRAINING = {
    "seq=2048&dp=8&zero=2": ("llama-2-7b", "h100-sxm-80gb", {"seq": 2048, "dp": 8, "zero": 2}),
    "model=mixtral-8x7b-v0.1&gpu=h200-141gb&seq=5000&zero=3&dp=16&recompute=full": (
        "mixtral-8x7b-v0.1", "h200-141gb", {"seq": 5000, "zero": 3, "dp": 16, "recompute": "full"},
    ),
    "micro_batch=8": ("llama-2-7b", "h100-sxm-80gb", {"micro_batch": 8}),
    "gpu=rtx-4090-24gb&method=qlora&recompute=full": (
        "llama-2-7b", "rtx-4090-24gb", {"method": "qlora", "recompute": "full"},
    ),
    "recipe=amp&seq=512": ("llama-2-7b", "h100-sxm-80gb", {"recipe": "amp", "seq": 512}),
    "sequence_parallel=off&tp=4": ("llama-2-7b", "h100-sxm-80gb", {"sequence_parallel": False, "tp": 4}),
    "global_batch=&nccl_mib=12.5&pp=2&dp=2": ("llama-2-7b", "h100-sxm-80gb", {"nccl_mib": 12.5, "pp": 2, "dp": 2}),
    "model=qwen3-8b&objective=dpo&prompt_tokens=128": ("qwen3-8b", "h100-sxm-80gb", {"objective": "dpo", "prompt_tokens": 128}),
    "implementation=fused&recipe=megatron-bf16&tp=2&dp=4&zero=1": (
        "llama-2-7b", "h100-sxm-80gb", {"implementation": "fused", "recipe": "megatron-bf16", "tp": 2, "dp": 4, "zero": 1},
    ),
    "offload=optimizer&recipe=mixed-16&gpu=v100-sxm-32gb": (
        "llama-2-7b", "v100-sxm-32gb", {"offload": "optimizer", "recipe": "mixed-16"},
    ),
    "optimizer=adamw-8bit": ("llama-2-7b", "h100-sxm-80gb", {"optimizer": "adamw-8bit"}),
    "optimizer_kernel=fused&seq=8192": ("llama-2-7b", "h100-sxm-80gb", {"optimizer_kernel": "fused", "seq": 8192}),
    "loss=fused&model=gpt2": ("gpt2", "h100-sxm-80gb", {"loss": "fused"}),
    "attention=eager&model=gpt2&dropout=off": ("gpt2", "h100-sxm-80gb", {"attention": "eager", "dropout": "off"}),
    "lora_rank=64&method=lora&lora_targets=all-linear": (
        "llama-2-7b", "h100-sxm-80gb", {"lora_rank": 64, "method": "lora", "lora_targets": ("all-linear",)},
    ),
    "model=meta-llama-3.1-8b&dp=8&zero=3&recipe=fsdp-bf16&reshard_after_forward=false": (
        "meta-llama-3.1-8b", "h100-sxm-80gb", {"dp": 8, "zero": 3, "recipe": "fsdp-bf16", "reshard_after_forward": False},
    ),
}  # fmt: skip
OLD_SERVING = {
    "context=32768&kv_dtype=fp8&weights=bf16": {"context": 32768, "kv_dtype": "fp8", "weights": "bf16"},
    "concurrency=30&weights=bf16&kv_dtype=bf16": {"concurrency": 30, "weights": "bf16", "kv_dtype": "bf16"},
    "engine=vllm&weights=fp8&kv_dtype=bf16": {"engine": "vllm", "weights": "fp8", "kv_dtype": "bf16"},
    "tp=2&context=8192&weights=bf16&kv_dtype=bf16&prompt=0": {
        "tp": 2, "context": 8192, "weights": "bf16", "kv_dtype": "bf16",
    },
    "engine=llama.cpp&weights=gguf-Q4_K_M&kv_dtype=q8_0": {
        "engine": "llama.cpp", "weights": "gguf-Q4_K_M", "kv_dtype": "q8_0",
    },
    "keep_window=1000&keep_sinks=4&weights=bf16&kv_dtype=bf16": {
        "keep_window": 1000, "keep_sinks": 4, "weights": "bf16", "kv_dtype": "bf16",
    },
}  # fmt: skip
OLD_OTHERS = {
    "compute": (
        "tokens=2000000000000&gpus=1024",
        "mfu=0.5&gpu=a100-sxm-80gb",
        "gpu_hours=184320&gpus=2048&tokens=2000000000000",
        "dtype=fp8&price_per_gpu_hour=2.5",
    ),
    "pipeline": (
        "schedule=zb-h1&stages=6",
        "schedule=interleaved&stages=4&microbatches=8&virtual_stages=2",
        "forward=1,2,3,4&stages=4",
        "virtual_stages=",
    ),
    "params": ("lora_rank=16&model=mixtral-8x7b-v0.1", "model=deepseek-v3"),
}


def test_old_links_of_the_training_page_open_to_the_same_figures():
    wrong = []
    for link, (model, device, plan) in OLD_TRAINING.items():
        found = read_text(link)
        now = train(found.scenario.spec(), found.scenario.of(TRAIN), found.scenario.gpu())
        then = train(load(model), TrainingPlan(**plan), gpu(device))
        if found.complaints or now.as_json() != then.as_json():
            wrong.append((link, found.complaints))
    assert wrong == []


def test_old_links_of_the_serving_page_open_to_the_same_figures():
    wrong = []
    for link, plan in OLD_SERVING.items():
        found = read_text(link)
        now = serve(found.scenario.spec(), found.scenario.of(SERVE), found.scenario.gpu())
        if (
            found.complaints
            or now.as_json() != serve(load("llama-2-7b"), ServingPlan(**plan), gpu("h100-sxm-80gb")).as_json()
        ):
            wrong.append((link, found.complaints))
    assert wrong == []


@pytest.mark.parametrize("command", list(OLD_OTHERS))
def test_old_links_of_the_other_pages_are_read_whole(command):
    plan = COMMANDS[command].plan
    for link in OLD_OTHERS[command]:
        found = read(parse_qs(link, keep_blank_values=True), [plan, *PLANS])
        assert found.complaints == []
        assert found.scenario.subject.model in link or found.scenario.subject.model == "llama-2-7b"
        for name, value in parse_qs(link).items():
            if name in plan.model_fields:
                assert (
                    str(getattr(found.scenario.of(plan), name)).replace(" ", "").strip("()").replace(".0", "")
                    == value[0]
                )


def test_the_second_scenario_of_an_old_link_is_a_pin():
    found = read_text("compare=true&seq=2048&b_model=deepseek-v3&b_micro_batch=8")
    assert found.complaints == []
    [pin] = found.pins
    assert (pin.subject.model, pin.of(TRAIN).micro_batch, pin.of(TRAIN).seq) == ("deepseek-v3", 8, 4096)
    assert found.scenario.of(TRAIN).seq == 2048


def test_a_later_default_does_not_change_a_link(monkeypatch):
    scenario = Scenario({"recipe": "fp32"})
    link = parameters(scenario, (TRAIN,))
    assert set(START) & set(link) == {"recipe"}
    assert link["v"] == ["2"]
    assert dict(START) == {
        "recipe": "amp",
        "recompute": "full",
        "optimizer_kernel": "fused",
        "tokens": 10**12,
        "output": 512,
    }  # of version 2


def test_nonsense_is_named_and_the_rest_is_kept():
    bad = "seq=banana&micro_batch=-4&optimizer=magic&model=gpt-17&zeero=2&dp=1e99&pp=nan"
    found = read_text(f"{bad}&zero=3&gpu=a100-sxm-80gb")
    said = " | ".join(found.complaints)
    for complaint in (
        "seq: 'banana' is not allowed; it must be",
        "micro_batch: '-4' is not allowed; it must be greater than or equal to 1",
        "optimizer: 'magic' is not allowed; it must be one of adamw, sgd",
        "model: 'gpt-17' is not allowed; it must be one of the",
        "zeero: unknown parameter (its value is '2'); close ones are zero",
        "dp: '1e99' is not allowed; it must be",
        "pp: 'nan' is not allowed; it must be",
    ):
        assert complaint in said
    assert found.scenario.of(TRAIN).zero == 3
    assert found.scenario.subject.gpu == "a100-sxm-80gb"
