"""Each topic of Learn in a real browser: its numbers are the library's, and what cannot be is a sentence."""

import pytest
from playwright.sync_api import Page, expect

from calc.model.bare import BareModelPlan, bare_model
from calc.number_formats import number_format
from calc.parameters import parameters
from calc.units import show_value
from tests.pages.server import Server, open_page

pytestmark = pytest.mark.browser


def figures(page: Page) -> list[str]:
    return page.get_by_test_id("stMetricValue").all_inner_texts()


def test_a_model_from_its_sizes_has_the_library_s_counts(page: Page, server: Server):
    open_page(page, f"{server.url}/learn?v=2&num_hidden_layers=4&num_experts=8&vocab_size=32000")
    answer = parameters(bare_model(BareModelPlan(num_hidden_layers=4, num_experts=8, vocab_size=32000)))
    counts = (answer.total, answer.active, answer.embedding, answer.trainable)
    assert figures(page) == [show_value(count, "parameters") for count in counts]
    expect(page.locator(".katex").first).to_be_visible()
    expect(page.get_by_text("Source:").first).to_be_visible()


def test_sizes_that_do_not_go_together_are_a_sentence(page: Page, server: Server):
    open_page(page, f"{server.url}/learn?v=2&num_key_value_heads=5")
    expect(page.get_by_test_id("stAlert")).to_contain_text("num_key_value_heads")
    assert page.get_by_test_id("stException").count() == 0


@pytest.mark.parametrize("name", ["fp8-e4m3", "nvfp4", "nf4", "Q4_K", "fp32"])
def test_a_number_format_has_the_library_s_range_and_spacing(name: str, page: Page, server: Server):
    open_page(page, f"{server.url}/learn?v=2&topic=number-formats&number_format={name}&spacing_at=0.5")
    form = number_format(name)
    shown = figures(page)
    assert shown[:3] == [f"{form.bits_per_weight:g}", f"{form.max:.6g}", f"{form.spacing(0.5):.6g}"]
    assert len(shown) == (3 if form.smallest_normal is None else 4)


@pytest.mark.parametrize("name", ["mxfp4", "int8", "fp4"])
def test_a_value_beyond_a_format_is_a_sentence(name: str, page: Page, server: Server):
    open_page(page, f"{server.url}/learn?v=2&topic=number-formats&number_format={name}&spacing_at=1000")
    assert page.get_by_test_id("stException").count() == 0
    expect(page.get_by_test_id("stAlert")).to_contain_text(
        f"the largest value of {name} is {number_format(name).max:g}"
    )
