"""The page that measures, in a real Chromium against a real server: press, watch, read, take home."""

import csv
import os
import signal
import time
from pathlib import Path

import pytest

from calc.measurements.records import Measured, Records, as_csv
from tests.pages.server import PATIENCE, open_page, serve, settled, unfold

pytestmark = [pytest.mark.browser, pytest.mark.torch]

RUN_PATIENCE = 90_000  # milliseconds; a small run takes ten seconds on an idle machine
PROGRESS = '[data-testid="stProgress"]'


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    before = os.environ.get("PLUMBLINE_DATA")
    os.environ["PLUMBLINE_DATA"] = str(folder)
    yield folder
    if before is None:
        del os.environ["PLUMBLINE_DATA"]
    else:
        os.environ["PLUMBLINE_DATA"] = before


@pytest.fixture(scope="module")
def server(data):
    with serve() as server:
        yield server


@pytest.fixture
def page(browser, server):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    open_page(page, f"{server.url}/measure?device=cpu")
    page.wait_for_selector("text=Run", timeout=RUN_PATIENCE)
    yield page
    page.close()


def press_run(page):
    page.get_by_role("button", name="Run", exact=True).click()
    page.wait_for_selector(PROGRESS, timeout=PATIENCE)


def children_of(pid):
    """The processes that this one started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def test_a_run_is_pressed_watched_and_taken_home(page, server, data):
    press_run(page)
    page.wait_for_selector("text=finished on", timeout=RUN_PATIENCE)
    settled(page)
    assert page.get_by_text("Measured against predicted").count() == 1
    assert page.get_by_role("tab").all_inner_texts()[:3] == ["small, fp32", "small, amp", "small, pure-bf16"]
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV", exact=True).click()
    rows = list(csv.DictReader(Path(download.value.path()).read_text(encoding="utf-8").splitlines()))
    stored = Records(data / "results.sqlite3").rows()
    assert [(row["quantity"], int(row["measured"])) for row in rows] == [
        (row["quantity"], row["measured"]) for row in stored
    ]
    assert all(row["predicted"] == row["measured"] for row in rows)
    assert "torch" not in server.maps()  # the server itself imported none of it


def test_what_was_measured_before_can_be_taken_home(page, data):
    unfold(page.get_by_text("Measured before"))
    with page.expect_download() as download:
        page.get_by_role("button", name="All as CSV").click()
    assert Path(download.value.path()).read_text(encoding="utf-8") == as_csv(Records(data / "results.sqlite3").rows())


def test_the_roofline_of_a_machine_is_drawn(page, data):
    records = Records(data / "results.sqlite3")
    records.begin("theirs", "matmul-rate", {}, {"device": "NVIDIA A100-SXM4-80GB", "catalogue": "a100-sxm-80gb"})
    records.add("theirs", Measured("8192", "rate/bf16/torch", 312.0, 250.0, "TFLOP/s", 249.0, 251.0))
    records.add("theirs", Measured("8192", "intensity/bf16/torch", 2730.0, None, "FLOP/B"))
    page.reload()
    page.get_by_text("Roofline", exact=True).click(timeout=RUN_PATIENCE)
    page.wait_for_selector("text=data sheet, 16 bits", timeout=PATIENCE)
    assert page.get_by_text("matmul-rate, bf16/torch").count() == 1


def test_someone_elses_results_are_taken_in_and_stand_beside(page, tmp_path, data):
    theirs = Records(tmp_path / "theirs.sqlite3")
    theirs.begin("one", "decoder-states", {}, {"device": "a machine far away"})
    theirs.add("one", Measured("small, fp32", "parameters/head/weight", 4, 4, "bytes"))
    (tmp_path / "lab.csv").write_text(as_csv(theirs.rows()))
    page.locator('input[type="file"]').last.set_input_files(tmp_path / "lab.csv")
    page.get_by_role("button", name="Take them in").click()
    page.wait_for_selector("text=1 rows of 1 runs were taken in, from lab.csv", timeout=PATIENCE)
    page.reload()
    settled(page)
    unfold(page.get_by_text("Compare two machines"))
    page.wait_for_selector("text=a machine far away (from lab.csv)", timeout=PATIENCE)


def test_a_run_goes_on_without_its_tab_and_can_be_cancelled_from_another(page, browser, server, data):
    press_run(page)
    page.close()
    another = browser.new_page()
    open_page(another, f"{server.url}/measure")
    another.wait_for_selector(PROGRESS, timeout=PATIENCE)
    another.get_by_role("button", name="Cancel").click()
    another.wait_for_selector("text=cancelled", timeout=PATIENCE)
    assert not children_of(server.pid)
    another.close()


def test_a_link_restores_what_to_measure(browser, server):
    page = browser.new_page()
    open_page(page, f"{server.url}/measure?workload=memory-bandwidth&size=medium&device=cpu")
    page.wait_for_selector(
        "text=python -m measure run memory-bandwidth --size medium --device cpu", timeout=RUN_PATIENCE
    )
    page.close()


def test_a_killed_server_takes_its_runs_with_it(browser, data):
    with serve() as server:
        page = browser.new_page()
        open_page(page, f"{server.url}/measure?device=cpu")
        page.wait_for_selector("text=Run", timeout=RUN_PATIENCE)
        press_run(page)
        (runner,) = children_of(server.pid)
        deadline = time.monotonic() + PATIENCE / 1000
        while not (measuring := children_of(runner)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(server.pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE / 1000
        for pid in (runner, *measuring):
            while (
                Path(f"/proc/{pid}/stat").exists()
                and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
            ):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        page.close()


def test_a_server_with_measuring_switched_off_does_not_offer_it(browser, monkeypatch):
    monkeypatch.setenv("MEASURE", "off")
    with serve() as server:
        page = browser.new_page()
        open_page(page, server.url)
        assert page.get_by_role("link", name="Model", exact=True).count() >= 1
        assert page.get_by_role("link", name="Verify", exact=True).count() == 0
        page.close()
