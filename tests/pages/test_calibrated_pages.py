"""Switched on, what was measured changes the other pages, says so, and is in their link and their command; in a real Chromium."""

import os
import re

import pytest
from playwright.sync_api import expect

from calc.measurements.records import Measured, Records
from calc.units import MiB
from tests.pages.server import open_page, open_tab, serve, settled, unfold

pytestmark = pytest.mark.browser

H100 = {"device": "NVIDIA H100 80GB HBM3", "kind": "cuda", "catalogue": "h100-sxm-80gb", "origin": "a test"}
MEASURED = {
    "memory-bandwidth": Measured("2 GiB, bf16", "bandwidth/copy/torch", 3350.0, 3015.0, "GB/s", 2680.0, 3020.0),
    "matmul-rate": Measured("8192", "rate/bf16/torch", 989.5, 791.6, "TFLOP/s", 692.65, 800.0),
    "context-and-workspace": Measured("a process of its own", "context", 512 * MiB, 256 * MiB, "bytes"),
}


@pytest.fixture(scope="module")
def page(tmp_path_factory, browser):
    folder = tmp_path_factory.mktemp("data")
    records = Records(folder / "results.sqlite3")
    for workload, row in MEASURED.items():
        records.begin(workload, workload, {}, H100)
        records.add(workload, row)
    before = os.environ.get("PLUMBLINE_DATA")
    os.environ["PLUMBLINE_DATA"] = str(folder)
    try:
        with serve() as server:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.url_of = lambda path: f"{server.url}/{path}"
            yield page
            page.close()
    finally:
        os.environ.pop("PLUMBLINE_DATA") if before is None else os.environ.update(PLUMBLINE_DATA=before)


def figure(page, label):
    metric = page.get_by_test_id("stMetric").filter(has_text=re.compile(f"^{re.escape(label)}")).first
    return metric.get_by_test_id("stMetricValue").inner_text()


def test_switching_measurements_on_changes_the_training_page(page):
    open_page(page, page.url_of("training?gpu=h100-sxm-80gb"))
    before = figure(page, "GPU memory")
    unfold(page.get_by_test_id("stSidebar").get_by_text("Settings", exact=True))
    page.get_by_role("combobox", name=re.compile("Calibrate with my GPU")).click()
    page.get_by_role("option", name="conservative").click()
    page.wait_for_selector("text=measured by context-and-workspace on NVIDIA H100 80GB HBM3 (from a test), one run")
    settled(page)
    assert figure(page, "GPU memory") != before
    assert "calibrated=bound" in page.url
    open_tab(page, "Command")
    expect(page.get_by_text("--calibrated bound")).to_have_count(1)


def test_a_link_brings_the_measured_efficiencies_to_the_serving_page(page):
    open_page(page, page.url_of("kv_cache?calibrated=point"))
    notes = page.get_by_text("calibrated: bandwidth_efficiency is 0.9 (median 0.9, careful end 0.8)")
    assert notes.count() >= 1
    assert page.get_by_text("calibrated: compute_efficiency is 0.8 (median 0.8, careful end 0.7)").count() >= 1


def test_a_gpu_that_nobody_measured_says_so(page):
    open_page(page, page.url_of("training?calibrated=point&gpu=a100-sxm-80gb"))
    assert page.get_by_text("nothing that was measured on a100-sxm-80gb is here, so nothing is changed").count() >= 1
