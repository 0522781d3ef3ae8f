"""The page of parameters: its treemap next to the table, and what the Hub states."""

import pytest
from playwright.sync_api import Page, expect

from tests.pages.server import PATIENCE, Server, open_page, open_tab

pytestmark = pytest.mark.browser


def tile(page: Page, name: str):
    return page.locator(".js-plotly-plot .slicetext").filter(has_text=name).first


def test_a_treemap_shows_the_experts_that_a_token_uses_and_a_click_opens_a_part(page: Page, server: Server):
    open_page(page, f"{server.url}/parameters?model=qwen3-30b-a3b")
    page.locator(".js-plotly-plot .slicetext").first.wait_for(timeout=PATIENCE)
    expect(tile(page, "experts × 128 × 48 layers")).to_be_attached()
    expect(tile(page, "120 idle")).to_contain_text("27.18 B")  # 15/16 of 48 · 128 experts of 3 · 2048 · 768
    expect(tile(page, "8 for a token")).to_contain_text("1.81 B")
    tile(page, "experts × 128 × 48 layers").click(force=True)
    expect(tile(page, "head")).to_have_count(0)


def test_the_hubs_total_is_shown_with_the_reasons_why_it_differs(page: Page, server: Server):
    open_page(page, f"{server.url}/parameters?model=deepseek-v3")
    open_tab(page, "Hub page")
    for said in ("684,531,386,000", "+13,504,981,648", "+13,463,426,048: prediction layers", "+41,555,600: "):
        expect(page.get_by_role("tabpanel", name="Hub page")).to_contain_text(said)
