"""The training page says what would make a step fit, and a button makes it so."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from calc.catalogue import load
from calc.hardware import gpu
from calc.training import TrainingPlan, suggest, train
from tests.pages.server import Server, open_page, settled, unfold

pytestmark = pytest.mark.browser

H100 = gpu("h100-sxm-80gb")
LLAMA = load("llama-2-7b")


def figure(page: Page, label: str, at: int = 0) -> str:
    metric = page.get_by_test_id("stMetric").filter(has_text=re.compile(f"^{re.escape(label)}")).nth(at)
    return metric.get_by_test_id("stMetricValue").inner_text()


def verdict(page: Page) -> Locator:
    return page.get_by_test_id("stAlert").filter(has_text="Training")


def test_a_change_that_fits_is_applied_by_its_button_in_the_sidebar_and_in_the_link(page: Page, server: Server):
    open_page(page, f"{server.url}/training?micro_batch=8")
    found = suggest(train(LLAMA, TrainingPlan(micro_batch=8), H100))
    expect(verdict(page)).to_contain_text("does not fit")
    buttons = page.get_by_role("button", name="Apply")
    at = next(index for index, change in enumerate(found.fixes) if change.values == {"recompute": "full"})
    expect(buttons.nth(at)).to_be_visible()
    settled(page)
    buttons.nth(at).click()
    expect(verdict(page)).to_contain_text("Training fits")
    settled(page)
    expect(buttons).to_have_count(0)
    assert set(page.url.partition("?")[2].split("&")) == {"micro_batch=8", "recompute=full"}
    unfold(page.get_by_test_id("stSidebar").get_by_text("Activations", exact=True))
    expect(page.get_by_role("combobox", name="Recompute")).to_have_value("full")
    after = suggest(train(LLAMA, TrainingPlan(micro_batch=8, recompute="full"), H100))
    assert figure(page, "Max micro-batch") == f"{after.largest_micro_batch:,}"
    assert figure(page, "Max sequence") == f"{after.largest_seq:,}"
    assert figure(page, "Saved weights") == "12.55 GiB"
    assert figure(page, "Saved to resume") == "37.65 GiB"


def test_a_change_of_the_page_and_of_the_sidebar_at_once_is_applied_whole(page: Page, server: Server):
    open_page(page, f"{server.url}/training?model=meta-llama-3.1-8b&gpu=rtx-4090-24gb&implementation=liger")
    plan = TrainingPlan(implementation="liger")
    fixes = suggest(train(load("meta-llama-3.1-8b"), plan, gpu("rtx-4090-24gb"))).fixes
    at, change = next((at, change) for at, change in enumerate(fixes) if {"method", "seq"} == set(change.values))
    buttons = page.get_by_role("button", name="Apply")
    expect(buttons.nth(at)).to_be_visible()
    settled(page)
    buttons.nth(at).click()
    expect(verdict(page)).to_contain_text("Training fits")
    expect(verdict(page)).to_contain_text("fits, but not with the highest overheads that were reported (26.27 GiB)")
    settled(page)
    expect(page.get_by_role("spinbutton", name="Sequence (tokens)")).to_have_value(f"{change.values['seq']}")
    unfold(page.get_by_test_id("stSidebar").get_by_text("Method", exact=True).first)
    expect(page.get_by_role("combobox", name="Method")).to_have_value(change.values["method"])
    assert {f"{name}={value}" for name, value in change.values.items()} < set(page.url.partition("?")[2].split("&"))


def test_a_change_of_the_second_scenario_leaves_the_first_as_it_is(page: Page, server: Server):
    open_page(page, f"{server.url}/training?compare=true&b_micro_batch=8")
    expect(verdict(page).nth(0)).to_contain_text("Training fits")
    expect(verdict(page).nth(1)).to_contain_text("does not fit")
    expect(page.get_by_role("button", name="Apply").first).to_be_visible()
    settled(page)
    page.get_by_role("button", name="Apply").first.click()
    expect(verdict(page).nth(1)).to_contain_text("Training fits")
    settled(page)
    first = suggest(train(LLAMA, TrainingPlan(micro_batch=8), H100)).fixes[0]
    expected = {f"b_{name}={value}" for name, value in first.values.items()}
    assert set(page.url.partition("?")[2].split("&")) - {"compare=true"} <= expected
    assert "&micro_batch" not in page.url
