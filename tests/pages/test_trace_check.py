"""'Check with a trace' on the training page, in a real Chromium: press, watch, read both sides, cancel."""

import json
import time
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.pages.server import PATIENCE, open_page, open_tab, serve

pytestmark = [pytest.mark.browser, pytest.mark.torch]

TRACE_PATIENCE = 90_000  # milliseconds; a small trace takes six seconds on an idle machine
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
}
PROGRESS = '[data-testid="stProgress"]'


def children_of(pid: int) -> list[int]:
    """The processes that this one started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@pytest.fixture
def own_server(tmp_path, monkeypatch):
    monkeypatch.setenv("PLUMBLINE_DATA", str(tmp_path))
    with serve() as found:
        yield found


def open_training(page: Page, url: str, seq: int) -> None:
    open_page(page, f"{url}/training?model=custom&seq={seq}&micro_batch=2")
    area = page.get_by_role("textbox", name="config.json, pasted")
    area.fill(json.dumps(CONFIG))
    area.press("Control+Enter")
    open_tab(page, "Trace")
    expect(page.get_by_role("button", name="Check with a trace")).to_be_visible()


def test_a_trace_is_pressed_watched_read_and_cancelled(page: Page, own_server):
    open_training(page, own_server.url, 64)
    page.get_by_role("button", name="Check with a trace").click()
    page.wait_for_selector(PROGRESS, timeout=PATIENCE)
    expect(page.get_by_text("Peak predicted")).to_contain_text("error +0.00%", timeout=TRACE_PATIENCE)
    expect(page.get_by_text("observed: LlamaForCausalLM")).to_contain_text("3 of 3 layers run")
    assert "torch" not in own_server.maps()  # the server itself imported none of it

    page = page.context.new_page()
    open_training(page, own_server.url, 128)  # another step: what was traced is not of this one
    expect(page.get_by_text("Peak predicted")).to_have_count(0)
    page.get_by_role("button", name="Check with a trace").click()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("Trace cancelled", exact=True)).to_be_visible()
    deadline = time.monotonic() + PATIENCE / 1000
    while children_of(own_server.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_a_trace_does_not_run_is_said_in_one_line(page: Page, own_server):
    open_page(page, f"{own_server.url}/training?model=llama-2-7b&tp=2&seq=64")
    open_tab(page, "Trace")
    page.get_by_role("button", name="Check with a trace").click()
    expect(page.get_by_text("--tp: 2 is not allowed; a trace runs 1 only")).to_be_visible()


def test_a_server_with_measuring_switched_off_offers_no_trace(page: Page, monkeypatch):
    monkeypatch.setenv("MEASURE", "off")
    with serve() as server:
        open_page(page, f"{server.url}/training")
        open_tab(page, "Trace")
        expect(page.get_by_text("Tracing is switched off on this server")).to_be_visible()
        expect(page.get_by_role("button", name="Check with a trace")).to_have_count(0)
