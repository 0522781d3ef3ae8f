"""The app as its users meet it: a real server, a real Chromium."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from calc.catalogue import load, load_config
from calc.command_line.tables import answer_json
from calc.compute import ComputePlan, compute
from calc.hardware import gpu
from calc.pipeline import PipelinePlan, simulate
from calc.serving import ServingPlan
from calc.serving import serve as serve_model
from calc.training import TrainingPlan, suggest, train
from tests.pages.server import PATIENCE, ROOT, Server, open_page, open_tab, serve, settled, unfold
from tests.recorded.recording import drawn

pytestmark = pytest.mark.browser

HEADINGS = {
    "": "Which GPU, which way?",
    "training": "Train: what does one step hold?",
    "kv_cache": "Serve: how many users, how fast?",
    "compute": "Cluster: how many days, how much money?",
    "pipeline": "Schedules: how busy is a pipeline?",
    "parameters": "Model: what is in it?",
    "learn": "Learn: why these numbers?",
    "measure": "Verify: how far from reality?",
}
TABS = {"training": "Train", "kv_cache": "Serve", "compute": "Cluster", "parameters": "Model"}
H100 = gpu("h100-sxm-80gb")
LLAMA = load("llama-2-7b")


def box(page: Page, label: str) -> Locator:
    return page.get_by_role("textbox", name=label, exact=True).first


def figure(page: Page, label: str) -> str:
    """The value of a headline figure."""
    metric = page.get_by_test_id("stMetric").filter(has_text=re.compile(f"^{re.escape(label)}")).first
    return metric.get_by_test_id("stMetricValue").inner_text()


def write(page: Page, label: str, value: object) -> None:
    """Type into a field, and wait until the address says so or the field complains."""
    before = page.url
    box(page, label).fill(str(value))
    box(page, label).press("Enter")
    page.wait_for_function(
        "before => location.href !== before || /is not allowed/.test(document.body.innerText)", arg=before
    )
    settled(page)


def choose(page: Page, label: str, option: str) -> None:
    before = page.url
    page.get_by_role("combobox", name=label).first.click()
    page.get_by_role("option", name=option, exact=True).click()
    page.wait_for_function("before => location.href !== before", arg=before)
    settled(page)


def go_to(page: Page, address: str) -> None:
    page.get_by_role("link", name=TABS[address], exact=True).first.click()
    expect(page.locator("h1")).to_have_text(HEADINGS[address])
    settled(page)


def parameters_of(url: str) -> set[str]:
    return set(url.partition("?")[2].split("&"))


def healthy(page: Page) -> None:
    """No traceback, no page of Streamlit's own complaint."""
    assert page.get_by_test_id("stException").count() == 0
    assert page.get_by_text("Page not found").count() == 0


def test_every_page_is_opened_here():
    from app import pages

    assert sorted(page.HEADING for page in pages()) == sorted(HEADINGS.values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", list(HEADINGS))
def test_each_page_opens_by_its_own_url_first_on_a_fresh_server(name: str, page: Page):
    with serve() as fresh:
        open_page(page, f"{fresh.url}/{name}?model=qwen3-30b-a3b")
        expect(page.locator("h1")).to_have_text(HEADINGS[name])
        expect(page.get_by_role("combobox", name="Model").first).to_have_value("Qwen3 30B A3B")
        healthy(page)
        assert "libtorch" not in fresh.maps()


def test_the_first_page_is_a_sentence_whose_examples_and_matrix_become_the_scenario(page: Page, server: Server):
    open_page(page, server.url)
    page.get_by_role("button", name="QLoRA of 8B on an RTX 4090").click()
    page.wait_for_function("() => location.href.includes('gpu=rtx-4090-24gb')")
    settled(page)
    plan = TrainingPlan(
        seq=8192, method="qlora", lora_targets=("all-linear",), recompute="full", optimizer_kernel="fused"
    )
    needed = train(load("meta-llama-3.1-8b"), plan, gpu("rtx-4090-24gb")).driver_bytes
    assert figure(page, "GPU memory") == f"{needed / 2**30:.2f} GiB"
    cell = page.get_by_test_id("stVegaLiteChart").last.locator("svg .mark-rect path").nth(2)
    cell.click()  # full fine-tuning, on an L40S
    page.wait_for_function("() => location.href.includes('gpu=l40s-48gb')")
    settled(page)
    assert {"recipe=amp", "method=full"} & parameters_of(page.url) == set()  # where the app starts
    expect(page.get_by_role("combobox", name="GPU").first).to_have_value("NVIDIA L40S 48 GB")


def test_a_moved_slider_changes_the_chart_the_figures_and_the_link(page: Page, server: Server):
    open_page(page, f"{server.url}/training")
    needed = figure(page, "Activations")
    page.get_by_role("slider", name="Sequence (tokens)").press("ArrowRight")
    expect(box(page, "Sequence (tokens)")).to_have_value("8192")
    page.wait_for_function("() => location.href.includes('seq=8192')")
    settled(page)
    assert figure(page, "Activations") != needed
    assert {"v=2", "model=meta-llama-3.1-8b", "gpu=h200-141gb", "seq=8192"} == parameters_of(page.url)


def test_numbers_are_read_as_people_write_them_and_what_cannot_be_is_said_at_the_field(page: Page, server: Server):
    open_page(page, f"{server.url}/training")
    write(page, "Sequence (tokens)", "32k")
    expect(box(page, "Sequence (tokens)")).to_have_value("32768")
    needed = figure(page, "GPU memory")
    write(page, "Sequence (tokens)", "-4")
    expect(page.get_by_text("seq: '-4' is not allowed; it must be greater than or equal to 1")).to_be_visible()
    assert figure(page, "GPU memory") == needed  # the last good answer stays, grey
    expect(page.locator('[class*="st-key-stale"]').first).to_be_visible()
    assert "seq=32768" in page.url
    open_page(page, f"{server.url}/compute")
    write(page, "Tokens to train on", "1.5T")
    expect(box(page, "Tokens to train on")).to_have_value("1.5T")


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
    assert download(page, "JSON").decode() == answer_json(answer) + "\n"


def test_the_command_on_the_page_prints_the_bytes_that_the_page_downloads(page: Page, server: Server):
    open_page(page, f"{server.url}/parameters?model=mixtral-8x7b-v0.1&lora_rank=16")
    open_tab(page, "Command")
    command = page.get_by_test_id("stCode").first.inner_text().split()
    assert command[:5] == ["python", "-m", "calc", "params", "mixtral-8x7b-v0.1"]
    for button, form in (("CSV", "csv"), ("JSON", "json")):
        words = [sys.executable, *command[1:], "--format", form]
        printed = subprocess.run(words, cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
        assert download(page, button) == printed


def paste(page: Page, text: str) -> None:
    area = page.get_by_role("textbox", name="config.json, pasted")
    area.fill(text)
    area.press("Control+Enter")
    expect(page.get_by_text("paste or upload its config.json")).to_have_count(0)
    settled(page)


def test_a_pasted_config_is_counted_kept_from_page_to_page_and_travels_in_the_link(
    page: Page, server: Server, browser: Browser
):
    open_page(page, f"{server.url}/parameters?model=custom")
    expect(page.get_by_text("paste or upload its config.json")).to_be_visible()
    paste(page, json.dumps(load_config("llama-2-7b")))
    assert figure(page, "Parameters") == "6.74 B"
    go_to(page, "compute")
    assert "config=" in page.url
    context = browser.new_context()
    other = context.new_page()
    open_page(other, page.url.replace("/compute", "/parameters"))
    assert figure(other, "Parameters") == "6.74 B"
    context.close()


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
    expect(box(page, "Context (tokens)")).to_have_value("8192")
    healthy(page)


def test_an_uploaded_config_is_counted_and_a_large_file_is_refused(page: Page, server: Server, tmp_path: Path):
    small, large = tmp_path / "config.json", tmp_path / "large.json"
    small.write_text(json.dumps(load_config("qwen2-7b")))
    large.write_bytes(b" " * 50_000_000)
    open_page(page, f"{server.url}/parameters?model=custom")
    chooser = page.get_by_test_id("stFileUploaderDropzoneInput")
    chooser.set_input_files(large)
    expect(page.get_by_test_id("stFileUploader")).to_contain_text(re.compile(r"must be \d+\.0 ?MB or smaller"))
    page.reload()
    settled(page)
    chooser.set_input_files(small)
    expect(page.get_by_test_id("stMetric").first).to_contain_text("7.62 B")


def test_a_link_restores_the_scenario_and_its_pins_in_another_browser(page: Page, server: Server, browser: Browser):
    open_page(page, f"{server.url}/training?model=mixtral-8x7b-v0.1&gpu=h200-141gb&layout=by%20hand&v=2")
    write(page, "Sequence (tokens)", 5000)
    write(page, "ZeRO stage", 3)
    write(page, "Data parallel (dp)", 16)
    choose(page, "Activation checkpointing", "none")
    page.get_by_role("button", name="Pin", exact=True).click()
    page.wait_for_function("() => location.href.includes('pin=')")
    write(page, "Sequence (tokens)", 2048)
    expect(page.get_by_text("Compared with the pins")).to_be_visible()
    open_tab(page, "Command")
    link = page.get_by_test_id("stCode").last.inner_text()
    assert parameters_of(link) == parameters_of(page.url)
    needed = figure(page, "GPU memory")
    context = browser.new_context()
    other = context.new_page()
    open_page(other, link)
    assert figure(other, "GPU memory") == needed
    expect(box(other, "Sequence (tokens)")).to_have_value("2048")
    expect(box(other, "Data parallel (dp)")).to_have_value("16")
    other.get_by_role("button", name="Show pin 1").click()
    expect(box(other, "Sequence (tokens)")).to_have_value("5000")
    expect(other.get_by_role("combobox", name="GPU").first).to_have_value("NVIDIA H200 SXM 141 GB")
    context.close()


def test_nonsense_in_the_url_is_named_and_the_rest_is_kept(page: Page, server: Server):
    open_page(page, f"{server.url}/training?seq=banana&zeero=2&zero=3&gpu=a100-sxm-80gb")
    alert = page.get_by_test_id("stAlert").first
    expect(alert).to_contain_text("seq: 'banana' is not allowed; it must be")
    expect(alert).to_contain_text("zeero: unknown parameter (its value is '2'); close ones are zero")
    expect(box(page, "ZeRO stage")).to_have_value("3")
    expect(box(page, "Sequence (tokens)")).to_have_value("4096")
    expect(page.get_by_role("combobox", name="GPU").first).to_have_value("NVIDIA A100 SXM 80 GB")
    healthy(page)


def test_a_layout_that_does_not_divide_is_said_and_the_last_answer_stays_grey(page: Page, server: Server):
    open_page(page, f"{server.url}/training?tp=2&seq=3072")
    needed = figure(page, "GPU memory")
    write(page, "Tensor parallel (tp)", 3)
    expect(page.get_by_text("tp (3) must divide num_attention_heads (32)")).to_be_visible()
    expect(box(page, "Sequence (tokens)")).to_have_value("3072")
    assert figure(page, "GPU memory") == needed
    assert {"tp=3", "seq=3072"} < parameters_of(page.url)


def test_values_live_on_from_page_to_page_and_only_where_they_mean_the_same(page: Page, server: Server):
    open_page(page, f"{server.url}/training?v=2&seq=8192&model=qwen3-30b-a3b")
    go_to(page, "compute")
    expect(box(page, "Sequence (tokens)")).to_have_value("8192")
    go_to(page, "parameters")
    write(page, "LoRA rank", 16)
    go_to(page, "training")
    expect(box(page, "Sequence (tokens)")).to_have_value("8192")
    expect(page.get_by_role("combobox", name="Model").first).to_have_value("Qwen3 30B A3B")
    assert "lora_rank" not in page.url  # training's rank is its own
    go_to(page, "parameters")
    assert "lora_rank=16" in page.url


def test_a_change_that_fits_is_applied_by_its_button_in_the_fields_and_in_the_link(page: Page, server: Server):
    open_page(page, f"{server.url}/training?micro_batch=8")
    found = suggest(train(LLAMA, TrainingPlan(micro_batch=8), H100))
    expect(page.get_by_test_id("stAlert").first).to_contain_text("does not fit")
    at = next(index for index, change in enumerate(found.fixes) if change.values == {"recompute": "full"})
    page.get_by_role("button", name="Apply").nth(at).click()
    expect(page.get_by_test_id("stAlert").first).to_contain_text("Training fits")
    settled(page)
    expect(page.get_by_role("combobox", name="Activation checkpointing")).to_have_value("full")
    after = suggest(train(LLAMA, TrainingPlan(micro_batch=8, recompute="full"), H100))
    open_tab(page, "Limits")
    assert figure(page, "Max micro-batch") == f"{after.largest_micro_batch:,}"
    assert figure(page, "Max sequence") == f"{after.largest_seq:,}"
    assert figure(page, "Saved weights") == "12.55 GiB"
    assert figure(page, "Saved to resume") == "37.65 GiB"


def test_on_a_phone_nothing_is_wider_than_the_screen(page: Page, server: Server):
    page.set_viewport_size({"width": 390, "height": 844})
    for name in drawn(("", "training", "kv_cache"), 1):
        open_page(page, f"{server.url}/{name}")
        assert page.evaluate("document.querySelector('[data-testid=stMain]').scrollWidth") <= 390


def test_bytes_show_in_gib_or_gb(page: Page, server: Server):
    open_page(page, f"{server.url}/training?units=GB")
    assert figure(page, "Peak allocated").endswith(" GB")


def test_the_formula_shows_letters_numbers_and_source(page: Page, server: Server):
    open_page(page, f"{server.url}/kv_cache")
    open_tab(page, "Formulas")
    expect(page.locator(".katex").first).to_be_visible()
    expect(page.get_by_text("Source:").first).to_be_visible()


def test_every_page_asks_nothing_of_other_hosts_and_memory_stays_small(browser: Browser, server: Server):
    context = browser.new_context()
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for name in drawn(HEADINGS, 4):
        open_page(page, f"{server.url}/{name}")
        healthy(page)
        unnamed = [chart for chart in page.get_by_test_id("stVegaLiteChart").all() if not _name(chart)]
        assert not unnamed, f"a chart of /{name} has no description"
    own = (server.url, server.url.replace("http", "ws"), "data:", "blob:")
    assert [url for url in asked if not url.startswith(own)] == []
    assert "libtorch" not in server.maps()
    assert server.rss_bytes() < 300 * 2**20
    context.close()


def _name(chart: Locator) -> str | None:
    return chart.evaluate(
        "part => (part.closest('[aria-label]') || part.querySelector('[aria-label]'))?.ariaLabel || ''"
    )


def test_what_is_missing_is_said_once_on_the_first_page(page: Page, server: Server):
    open_page(page, f"{server.url}/?model=custom")
    expect(page.get_by_test_id("stAlert").first).to_contain_text("paste or upload its config.json")


def test_the_settings_fold_open_in_the_sidebar(page: Page, server: Server):
    open_page(page, f"{server.url}/training")
    unfold(page.get_by_test_id("stSidebar").get_by_text("Settings", exact=True))
    expect(page.get_by_role("combobox", name="Bytes in")).to_be_visible(timeout=PATIENCE)
