"""A pasted run becomes the scenario of the page: all of its plan, its model, and nothing of the scenario before."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from calc.commands import COMMANDS
from calc.external_formats.formats import read
from pages.ui.own_run import values_of
from pages.ui.scenario import Scenario
from tests.pages.server import Server

RUNS = {
    "serve": "vllm serve Qwen/Qwen3-8B -tp 2 --max-model-len 8192 --new-flag",
    "hub": "python -m sglang.launch_server --model-path some-owner/some-model --tp 4 --kv-cache-dtype fp8_e5m2",
    "train": "trl sft --model_name_or_path Qwen/Qwen3-8B --num_processes 8 --accelerate_config zero2 --max_length 2048",
}


@pytest.mark.parametrize("name", RUNS)
def test_the_scenario_of_a_run_is_its_plan_whatever_was_asked_before(name):
    found = read(RUNS[name])
    before = Scenario({"tp": 8, "recipe": "amp", "recompute": "full", "kv_dtype": "int8", "gpus": 64, "zero": 3})
    scenario = before.changed(values_of(found))
    assert scenario.of(COMMANDS[found.command].plan) == found.plan
    assert scenario.model == found.model
    if found.command == "train":
        assert (scenario.gpus, scenario.layout) == (8, "by hand")


@pytest.mark.browser
def test_a_run_is_pasted_on_the_page_and_what_is_not_understood_is_named(page: Page, server: Server):
    page.goto(f"{server.url}/kv_cache")
    page.get_by_text("Bring your own run").click()
    area = page.get_by_role("textbox", name="A command line or a config file, pasted")
    area.fill("vllm serve Qwen/Qwen3-8B -tp two")
    area.press("Control+Enter")
    page.get_by_role("button", name="Read it").click()
    expect(page.get_by_text("-tp: 'two' is not allowed; it must be a whole number")).to_be_visible()
    area.fill(RUNS["serve"])
    area.press("Control+Enter")
    page.get_by_role("button", name="Read it").click()
    expect(page.get_by_role("combobox", name="Model").first).to_have_value("Qwen3 8B")
    expect(page.get_by_text("--new-flag true: not a setting known here")).to_be_visible()
    assert page.get_by_test_id("stException").count() == 0
