"""The app as its users meet it: a real server, a real Chromium."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from calc.catalogue import load, load_config
from calc.command_line.tables import answer_json
from calc.compute import ComputePlan, compute
from calc.hardware import gpu
from calc.pipeline import PipelinePlan, simulate
from calc.serving import ServingPlan
from calc.serving import serve as serve_model
from calc.training import TrainingPlan, train
from tests.pages.server import PATIENCE, ROOT, Server, open_page, redrawn, serve, settled, unfold

pytestmark = pytest.mark.browser

TITLES = {
    "": "Does it fit?",
    "parameters": "Parameters",
    "training": "Training memory",
    "kv_cache": "KV cache",
    "compute": "Compute",
    "pipeline": "Pipeline",
    "measure": "Measure",
}
H100 = gpu("h100-sxm-80gb")
LLAMA = load("llama-2-7b")


def number(page: Page, label: str, at: int = 0):
    return page.get_by_role("spinbutton", name=label, exact=True).nth(at)


def figure(page: Page, label: str, at: int = 0) -> str:
    """The value of a headline figure."""
    metric = page.get_by_test_id("stMetric").filter(has_text=re.compile(f"^{re.escape(label)}")).nth(at)
    return metric.get_by_test_id("stMetricValue").inner_text()


def set_number(page: Page, label: str, value: object, at: int = 0) -> None:
    field = number(page, label, at)
    field.fill(str(value))
    with redrawn(page):
        field.press("Enter")


def bars(page: Page) -> list[str | None]:
    """The shapes of the page's first chart."""
    marks = page.get_by_test_id("stVegaLiteChart").first.locator("svg .mark-rect path")
    marks.first.wait_for(timeout=PATIENCE)
    return [mark.get_attribute("d") for mark in marks.all()]


def healthy(page: Page) -> None:
    """No traceback, no page of Streamlit's own complaint."""
    assert page.get_by_test_id("stException").count() == 0
    assert page.get_by_text("Page not found").count() == 0


@pytest.mark.parametrize("name", list(TITLES))
def test_each_page_opens_by_its_own_url_first_on_a_fresh_server(name: str, page: Page):
    with serve() as fresh:
        open_page(page, f"{fresh.url}/{name}?model=qwen3-30b-a3b")
        expect(page.locator("h1")).to_have_text(TITLES[name])
        expect(page.get_by_role("combobox", name="Model").first).to_have_value("qwen3-30b-a3b")
        healthy(page)
        assert "libtorch" not in fresh.maps()


def test_a_moved_slider_changes_the_chart_the_figures_and_the_link(page: Page, server: Server):
    open_page(page, f"{server.url}/training")
    before, needed = bars(page), figure(page, "Activations")
    page.get_by_role("slider", name="Sequence (tokens)").press("ArrowRight")
    expect(number(page, "Sequence (tokens)")).to_have_value("6144")
    shapes = "[...document.querySelectorAll('svg .mark-rect path')].map(path => path.getAttribute('d')).join()"
    page.wait_for_function(f"old => !{shapes}.startsWith(old)", arg=",".join(map(str, before)))
    settled(page)
    assert bars(page) != before
    assert figure(page, "Activations") != needed
    assert page.url.endswith("?seq=6144")


def download(page: Page, button: str) -> bytes:
    with page.expect_download() as started:
        page.get_by_role("button", name=button, exact=True).first.click()
    return Path(started.value.path()).read_bytes()


ANSWERS = {
    "training?seq=2048&dp=8&zero=2": lambda: train(LLAMA, TrainingPlan(seq=2048, dp=8, zero=2), H100),
    "kv_cache?context=32768&kv_dtype=fp8": lambda: serve_model(LLAMA, ServingPlan(context=32768, kv_dtype="fp8"), H100),
    "compute?tokens=2000000000000&gpus=1024": lambda: compute(
        LLAMA, ComputePlan(tokens=2_000_000_000_000, gpus=1024), H100
    ),
    "pipeline?schedule=zb-h1&stages=6": lambda: simulate(PipelinePlan(schedule="zb-h1", stages=6)),
}


@pytest.mark.parametrize("scenario", list(ANSWERS))
def test_downloads_hold_the_bytes_of_the_function(scenario: str, page: Page, server: Server):
    open_page(page, f"{server.url}/{scenario}")
    answer = ANSWERS[scenario]()
    assert download(page, "CSV") == answer.breakdown.csv().encode()
    assert json.loads(download(page, "JSON")) == json.loads(answer_json(answer))


def test_the_command_on_the_page_prints_the_bytes_that_the_page_downloads(page: Page, server: Server):
    open_page(page, f"{server.url}/parameters?model=mixtral-8x7b-v0.1&lora_rank=16")
    command = page.get_by_test_id("stCode").first.inner_text().split()
    assert command[:5] == ["python", "-m", "calc", "params", "mixtral-8x7b-v0.1"]
    for button, form in (("CSV", "csv"), ("JSON", "json")):
        words = [sys.executable, *command[1:], "--format", form]
        printed = subprocess.run(words, cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
        assert download(page, button) == printed


def paste(page: Page, text: str) -> None:
    area = page.get_by_role("textbox", name="config.json, pasted")
    area.fill(text)
    with redrawn(page):
        area.press("Control+Enter")


def test_a_pasted_config_is_counted_and_the_link_asks_for_it(page: Page, server: Server, browser: Browser):
    open_page(page, f"{server.url}/parameters?model=custom")
    expect(page.get_by_text("A config.json does not fit in a link")).to_be_visible()
    paste(page, json.dumps(load_config("llama-2-7b")))
    assert figure(page, "Parameters") == "6.74 B"
    unfold(page.get_by_text("This scenario as a link"))
    expect(page.get_by_text("whoever opens this one is asked for the file")).to_be_visible()
    page.get_by_role("link", name="Compute").click()  # the config is still there on the next page
    expect(page.locator("h1")).to_have_text("Compute")
    settled(page)
    assert figure(page, "Training, causal") == "175.57 TFLOP"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "config: not JSON"),
        ("[1]", "it must be a JSON object"),
        ('{"architectures": ["GizmoForCausalLM"]}', "'GizmoForCausalLM' is not understood"),
        (json.dumps(load_config("llama-2-7b") | {"num_hidden_layers": -3}), "num_hidden_layers: -3 is not allowed"),
        (json.dumps(load_config("llama-2-7b") | {"hidden_size": "<b>x</b>"}), "hidden_size: '<b>x</b>' is not allowed"),
    ],
    ids=["no-json", "no-object", "unknown-class", "negative", "markup"],
)
def test_a_bad_config_gets_one_message_and_leaves_the_other_widgets_alone(
    text: str, said: str, page: Page, server: Server
):
    open_page(page, f"{server.url}/kv_cache?model=custom&context=8192")
    paste(page, text)
    expect(page.get_by_test_id("stAlert")).to_have_count(1)
    expect(page.get_by_test_id("stAlert")).to_contain_text(said)
    expect(number(page, "Context (tokens)")).to_have_value("8192")
    healthy(page)


def test_an_uploaded_config_is_counted_and_a_large_file_is_refused(page: Page, server: Server, tmp_path: Path):
    small, large = tmp_path / "config.json", tmp_path / "large.json"
    small.write_text(json.dumps(load_config("qwen2-7b")))
    large.write_bytes(b" " * 50_000_000)
    open_page(page, f"{server.url}/parameters?model=custom")
    chooser = page.get_by_test_id("stFileUploaderDropzoneInput")
    chooser.set_input_files(large)
    expect(page.get_by_test_id("stFileUploader")).to_contain_text("large.json")
    expect(page.get_by_test_id("stFileUploader")).to_contain_text(re.compile(r"must be 2\.0 ?MB or smaller"))
    page.reload()
    settled(page)
    with redrawn(page):
        chooser.set_input_files(small)
    assert figure(page, "Parameters") == "7.62 B"


def test_a_link_restores_every_widget_in_another_browser(page: Page, server: Server, browser: Browser):
    open_page(page, f"{server.url}/training?model=mixtral-8x7b-v0.1&gpu=h200-141gb")
    set_number(page, "Sequence (tokens)", 5000)
    set_number(page, "ZeRO stage", 3)
    set_number(page, "Data parallel (dp)", 16)
    unfold(page.get_by_test_id("stSidebar").get_by_text("Activations", exact=True))
    page.get_by_role("combobox", name="Recompute").click()
    with redrawn(page):
        page.get_by_role("option", name="full").click()
    with redrawn(page):
        page.get_by_text("Compare with a second scenario").click()
    set_number(page, "Sequence (tokens)", 2048, at=1)
    unfold(page.get_by_text("This scenario as a link"))
    link = page.get_by_test_id("stCode").last.inner_text()
    needed = [figure(page, "Needed per GPU", at) for at in (0, 1)]
    assert link.partition("?")[2] == page.url.partition("?")[2] or set(link.partition("?")[2].split("&")) == set(
        page.url.partition("?")[2].split("&")
    )
    context = browser.new_context()
    other = context.new_page()
    open_page(other, link)
    assert [figure(other, "Needed per GPU", at) for at in (0, 1)] == needed
    expect(number(other, "Sequence (tokens)", 0)).to_have_value("5000")
    expect(number(other, "Sequence (tokens)", 1)).to_have_value("2048")
    expect(number(other, "Data parallel (dp)")).to_have_value("16")
    expect(other.get_by_role("combobox", name="GPU").first).to_have_value("h200-141gb")
    context.close()


def test_nonsense_in_the_url_is_named_and_the_rest_is_kept(page: Page, server: Server):
    bad = "seq=banana&micro_batch=-4&optimizer=magic&model=gpt-17&zeero=2&dp=1e99&pp=nan&b_seq=0"
    open_page(page, f"{server.url}/training?{bad}&zero=3&gpu=a100-sxm-80gb")
    alert = page.get_by_test_id("stAlert").first
    for said in (
        "seq: 'banana' is not allowed; it must be",
        "micro_batch: '-4' is not allowed; it must be greater than or equal to 1",
        "optimizer: 'magic' is not allowed; it must be one of adamw, sgd",
        "model: 'gpt-17' is not allowed; it must be one of the",
        "zeero: unknown parameter (its value is '2'); close ones are zero",
        "dp: '1e99' is not allowed; it must be",
        "pp: 'nan' is not allowed; it must be",
        "b_seq: '0' is not allowed; it must be",
    ):
        expect(alert).to_contain_text(said)
    expect(number(page, "ZeRO stage")).to_have_value("3")
    expect(number(page, "Sequence (tokens)")).to_have_value("4096")
    expect(page.get_by_role("combobox", name="GPU").first).to_have_value("a100-sxm-80gb")
    assert sorted(page.url.partition("?")[2].split("&")) == ["gpu=a100-sxm-80gb", "zero=3"]
    healthy(page)


def test_a_layout_that_does_not_divide_is_said_and_the_widgets_keep_their_values(page: Page, server: Server):
    open_page(page, f"{server.url}/training?tp=3&seq=3072")
    expect(page.get_by_test_id("stAlert")).to_contain_text("tp (3) must divide num_attention_heads (32)")
    expect(number(page, "Sequence (tokens)")).to_have_value("3072")
    set_number(page, "Sequence (tokens)", 6144)
    assert "tp=3" in page.url
    assert "seq=6144" in page.url


def go_to(page: Page, title: str) -> None:
    page.get_by_test_id("stSidebarNav").get_by_role("link", name=title).click()
    expect(page.locator("h1")).to_have_text(title)
    settled(page)


def test_values_live_on_from_page_to_page_and_only_where_they_mean_the_same(page: Page, server: Server):
    open_page(page, f"{server.url}/training?seq=8192&model=qwen3-30b-a3b")
    go_to(page, "Compute")
    expect(number(page, "Sequence (tokens)")).to_have_value("8192")
    go_to(page, "Parameters")
    expect(number(page, "LoRA rank")).to_have_value("0")  # training's rank of 8 is its own
    set_number(page, "LoRA rank", 16)
    go_to(page, "Training memory")
    expect(number(page, "Sequence (tokens)")).to_have_value("8192")
    expect(page.get_by_role("combobox", name="Model").first).to_have_value("qwen3-30b-a3b")
    page.get_by_text("Method", exact=True).first.click()
    expect(number(page, "LoRA rank")).to_have_value("8")
    go_to(page, "Parameters")
    expect(number(page, "LoRA rank")).to_have_value("16")
    assert "lora_rank=16" in page.url


def test_the_start_page_carries_its_scenario_to_the_pages(page: Page, server: Server):
    open_page(page, f"{server.url}/?seq=8192&context=32768&gpu=rtx-4090-24gb")
    expect(page.get_by_text("Training does not fit")).to_be_visible()
    page.get_by_role("link", name="KV cache →").click()
    expect(page.locator("h1")).to_have_text("KV cache")
    settled(page)
    expect(number(page, "Context (tokens)")).to_have_value("32768")
    assert "context=32768" in page.url
    assert "gpu=rtx-4090-24gb" in page.url


def _corners(page: Page) -> list[tuple[float, float]]:
    """Where the two scenarios' first inputs are."""
    found = [number(page, "Context (tokens)", at).bounding_box() for at in (0, 1)]
    return [(box["x"], box["y"]) for box in found if box]


def test_two_scenarios_stand_side_by_side_and_on_a_phone_one_above_the_other(page: Page, server: Server):
    open_page(page, f"{server.url}/kv_cache?compare=true&b_model=deepseek-v3")
    assert [figure(page, "Per token", at) for at in (0, 1)] == ["512.00 KiB", "68.62 KiB"]
    first, second = _corners(page)
    assert first[0] < second[0]
    assert abs(first[1] - second[1]) < 100
    page.set_viewport_size({"width": 390, "height": 844})
    fields = [number(page, "Context (tokens)", at).element_handle() for at in (0, 1)]
    page.wait_for_function("([a, b]) => a.getBoundingClientRect().x === b.getBoundingClientRect().x", arg=fields)
    first, second = _corners(page)
    assert first[0] == second[0]
    assert first[1] < second[1]
    wide = page.evaluate("document.querySelector('[data-testid=stMain]').scrollWidth")
    assert wide <= 390


def test_bytes_show_in_gib_or_gb(page: Page, server: Server):
    open_page(page, f"{server.url}/training?units=GB")
    assert figure(page, "Parameters") == "13.48 GB"


def test_the_formula_shows_letters_numbers_and_source(page: Page, server: Server):
    open_page(page, f"{server.url}/kv_cache")
    unfold(page.get_by_text("Show the formula"))
    box = page.get_by_test_id("stExpander").filter(has_text="Show the formula")
    expect(box.locator(".katex").first).to_be_visible()
    expect(box).to_contain_text("Source:")


def test_every_page_asks_nothing_of_other_hosts_and_memory_stays_small(browser: Browser, server: Server):
    context = browser.new_context()
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for name in TITLES:
        open_page(page, f"{server.url}/{name}")
        page.wait_for_load_state("networkidle")
        healthy(page)
    assert [
        url for url in asked if not url.startswith((server.url, server.url.replace("http", "ws"), "data:", "blob:"))
    ] == []
    assert "libtorch" not in server.maps()
    assert server.rss_bytes() < 300 * 2**20
    context.close()


@pytest.mark.parametrize(
    ("url", "said"), [("model=custom", "A config.json does not fit in a link"), ("tp=7", "tp (7) must divide")]
)
def test_what_several_cards_complain_of_is_said_once(url: str, said: str, page: Page, server: Server):
    open_page(page, f"{server.url}/?{url}")
    expect(page.get_by_test_id("stAlert")).to_have_count(1)
    expect(page.get_by_test_id("stAlert")).to_contain_text(said)
    expect(page.get_by_text("No answer, for the reason given above.").first).to_be_visible()
    expect(page.get_by_text("An example of stages and times, not this model's")).to_be_visible()
