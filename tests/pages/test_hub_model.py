"""A model of the Hugging Face Hub, by its id: the Hub is a server of this machine."""

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from calc.catalogue import load_config
from tests.calc.sources.hub_server import COMMIT, FakeHub, serving
from tests.pages.server import Server, open_page, open_tab, redrawn, serve

pytestmark = pytest.mark.browser

TOTAL = "6,738,415,616"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    with serving() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.endpoint)
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("cache")))
        for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
            patch.delenv(name, raising=False)
        hub.files["config.json"] = json.dumps(load_config("llama-2-7b")).encode()
        yield hub


@pytest.fixture(scope="module")
def own_server(hub: FakeHub) -> Iterator[Server]:
    with serve() as found:
        yield found


def give(page: Page, text: str) -> None:
    box = page.get_by_role("textbox", name="Hugging Face id")
    box.fill(text)
    with redrawn(page):
        box.press("Enter")


def ask_the_hub(page: Page) -> None:
    with redrawn(page):
        page.get_by_role("button", name="Ask the Hub").click()


def test_a_link_alone_fetches_nothing(page: Page, own_server: Server, hub: FakeHub):
    asked = len(hub.requests)
    open_page(page, f"{own_server.url}/parameters?model=hugging-face&hub_id=owner/unread")
    expect(page.get_by_test_id("stAlert")).to_contain_text("Nothing is fetched before you press Ask the Hub")
    assert len(hub.requests) == asked


def test_an_id_of_the_hub_is_fetched_once_and_its_link_restores_it(page: Page, own_server: Server, hub: FakeHub):
    open_page(page, f"{own_server.url}/parameters?model=hugging-face")
    expect(page.get_by_text("of the Hugging Face Hub: give its id")).to_be_visible()
    give(page, "tests/pages")  # a folder here, which is not what an id names
    expect(page.get_by_test_id("stAlert")).to_have_count(1)
    expect(page.get_by_test_id("stAlert")).to_contain_text("there is no such model")
    give(page, "/etc/passwd")
    expect(page.get_by_test_id("stAlert")).to_contain_text(
        "hub_id: '/etc/passwd' is not allowed; it must be owner/name"
    )
    give(page, "owner/name@main")
    open_tab(page, "Assumptions")
    expect(page.get_by_text(COMMIT)).to_be_visible()
    open_tab(page, "Command")
    expect(page.get_by_test_id("stCode").first).to_contain_text("calc params hub:owner/name@main")
    asked = len(hub.requests)
    link = page.url
    assert "hub_id=owner%2Fname%40main" in link
    open_page(page, link)
    ask_the_hub(page)
    open_tab(page, "Textbook form")
    expect(page.get_by_text(TOTAL).first).to_be_visible()
    assert len(hub.requests) == asked  # kept for an hour


def test_a_hub_that_refuses_is_one_line(page: Page, own_server: Server, hub: FakeHub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(hub.mode, "config.json", 401)
    open_page(page, f"{own_server.url}/kv_cache?model=hugging-face&hub_id=owner/name@{COMMIT}&context=8192")
    ask_the_hub(page)
    expect(page.get_by_test_id("stAlert")).to_have_count(1)
    expect(page.get_by_test_id("stAlert")).to_contain_text("access is refused (401)")
    expect(page.get_by_role("textbox", name="Context (tokens)", exact=True)).to_have_value("8192")


def test_what_the_hub_stores_is_read_when_asked_for(page: Page, own_server: Server, hub: FakeHub):
    header = json.dumps({"lm_head.weight": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}).encode()
    hub.files["model.safetensors"] = len(header).to_bytes(8, "little") + header + b"\0" * 12
    open_page(page, f"{own_server.url}/parameters?model=hugging-face&hub_id=owner/name")
    ask_the_hub(page)
    open_tab(page, "Hub page")
    page.get_by_text("Read what its files store").click()
    expect(page.get_by_text("Stored: 6 elements")).to_be_visible()
    expect(page.get_by_text("not explained; the file may be one shard")).to_be_visible()


def test_an_offline_hub_is_not_asked(page: Page, hub: FakeHub, monkeypatch: pytest.MonkeyPatch):
    asked = len(hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with serve() as offline:
        open_page(page, f"{offline.url}/parameters?model=hugging-face&hub_id=owner/other")
        ask_the_hub(page)
        expect(page.get_by_text("only what is in Hugging Face's cache is read")).to_be_visible()
        expect(page.get_by_test_id("stAlert")).to_contain_text("HF_HUB_OFFLINE is set")
    assert len(hub.requests) == asked
