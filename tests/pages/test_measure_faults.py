"""What happens to runs that the page started: many browsers press at once (twenty in `make test-all`), processes are killed.

The app answers throughout.
"""

import json
import os
import re
import signal
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from calc.measurements.records import Records
from measure.device_queue import queue
from tests.measure.runs import alive, is_free, until
from tests.pages.server import serve
from tests.recorded.recording import settings

pytestmark = [pytest.mark.browser, pytest.mark.torch]

BROWSERS = 20 if settings["recorded"] == "all" else 6
KEPT = 3  # runs that are left to end; the others are cancelled while they wait
SLOW = 240  # seconds that all browsers may take on a busy machine
PROGRESS = '[data-testid="stProgress"]'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server whose runs tell one row, wait for a file named `go`, and tell another."""
    folder = tmp_path_factory.mktemp("data")
    path = str(Path(__file__).with_name("stand_in"))
    wanted = {"PLUMBLINE_DATA": str(folder), "PYTHONPATH": path, "STAND_IN": "gated"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        with serve() as server:
            yield server
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(autouse=True)
def folder(server):
    """The folder of results, whose gate is closed; nobody holds the device before or after."""
    folder = Path(os.environ["PLUMBLINE_DATA"])
    (folder / "go").unlink(missing_ok=True)
    until(is_free, SLOW)
    yield folder
    (folder / "go").touch()
    until(is_free, SLOW)


@pytest.fixture(autouse=True)
def answers(server):
    """Asks the server for its page again and again, and fails the test when it did not answer once."""
    failures, over = [], threading.Event()

    def ask():
        while not over.wait(0.2):
            try:
                with urllib.request.urlopen(f"{server.url}/_stcore/health", timeout=60) as answer:
                    failures.extend([answer.status] if answer.status != 200 else [])
            except OSError as error:
                failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    yield
    over.set()
    asking.join()
    assert failures == []


@pytest.fixture
def context(browser):
    """Pages of it share what they load, and nothing else: each has a session of its own."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(SLOW * 1000)
    yield context
    context.close()


def opened(context, server):
    page = context.new_page()
    page.goto(f"{server.url}/measure?device=cpu&seconds=3600")
    page.get_by_role("button", name="Run", exact=True).wait_for()
    return page


def press(page):
    page.get_by_role("button", name="Run", exact=True).click()
    page.wait_for_selector(PROGRESS)


def pressed_in(milliseconds):
    """JavaScript that presses Run after so long: all pages' buttons go down together, without one waiting for another."""
    find = "[...document.querySelectorAll('button')].find(each => each.innerText.trim().endsWith('Run'))"
    return f"() => void setTimeout(() => {find}.click(), {milliseconds})"


def children_of(pid):
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


OWN = r"\(yours\): (?:on a test's processor|one row sent|.* has it, (\d+) ahead)"


def place_of(page):
    """How many are ahead of the run that this browser started, as its page says."""
    page.wait_for_function(f"() => new RegExp({json.dumps(OWN)}).test(document.body.innerText)", polling=200)
    (found,) = re.findall(OWN, page.inner_text("body"))
    return int(found or 0)


def rows():
    return [(row["run"], row["quantity"]) for row in Records().rows()]


def test_many_browsers_press_at_once_and_one_runs_at_a_time(context, server, folder):
    before = len(rows())
    pages = [opened(context, server) for _ in range(BROWSERS)]
    start = time.monotonic()
    for page in pages:
        page.evaluate(pressed_in(max(0, 3000 - round(1000 * (time.monotonic() - start)))))
    until(lambda: len(queue("cpu")) == BROWSERS, SLOW)
    assert len(Records().runs()) - len({run for run, _ in rows()[:before]}) == 1  # of all, one has begun
    places = {place_of(page): page for page in pages}
    assert sorted(places) == list(range(BROWSERS))  # each sees its own, and the one that runs is before all others
    for place in range(BROWSERS - 1, KEPT - 1, -1):
        page = places[place]
        page.get_by_role("button", name="Cancel").nth(1).click()  # its own, below the run that has the device
        until(lambda place=place: len(queue("cpu")) == place, SLOW)
        page.close()
    (folder / "go").touch()
    for place in range(KEPT):
        places[place].wait_for_selector("text=finished on")
        places[place].close()
    assert is_free()
    found = rows()[before:]
    assert [quantity for _, quantity in found] == ["row/1", "row/2"] * KEPT
    assert all(found[at][0] == found[at + 1][0] for at in range(0, len(found), 2))  # never in turns
    until(lambda: not children_of(server.pid), SLOW)


@pytest.mark.parametrize("victim", ["the child", "the runner"])
def test_a_process_that_is_killed_is_a_message_on_the_page_and_its_row_is_kept(context, server, folder, victim):
    page = opened(context, server)
    before = len(rows())
    press(page)
    page.wait_for_selector("text=one row sent")  # the store has a row before the page hears of it
    (runner,), (holder,) = children_of(server.pid), queue("cpu")
    os.kill(holder["process"] if victim == "the child" else runner, signal.SIGKILL)
    page.wait_for_selector("text=: failed.")
    page.get_by_role("button", name="CSV", exact=True).wait_for()
    until(is_free, SLOW)
    until(lambda: not alive(runner) and not alive(holder["process"]), SLOW)
    assert [quantity for _, quantity in rows()[before:]] == ["row/1"]
    (folder / "go").touch()
    press(page)  # and the next one runs
    page.wait_for_selector("text=finished on")
    page.close()


def test_a_killed_server_loses_no_row_and_leaves_no_process(context, server, folder):
    """Another server than the one that is asked for answers: the two share results and the queue of the device."""
    before = len(rows())
    with serve() as doomed:
        page = opened(context, doomed)
        press(page)
        until(lambda: len(rows()) == before + 1, SLOW)
        (runner,), (holder,) = children_of(doomed.pid), queue("cpu")
        os.kill(doomed.pid, signal.SIGKILL)
        until(lambda: not alive(runner) and not alive(holder["process"]), SLOW)
    until(is_free, SLOW)
    assert [quantity for _, quantity in rows()[before:]] == ["row/1"]
    page.close()


def test_a_full_store_is_a_message_on_the_page(context, server, folder):
    """The file of results cannot be written: its place is a folder, as a full disk or a lost one would be."""
    page = opened(context, server)
    kept = (folder / "results.sqlite3").rename(folder / "kept")
    (folder / "results.sqlite3").mkdir()
    page.get_by_role("button", name="Run", exact=True).click()
    page.wait_for_selector("text=is not a plain file")
    (folder / "results.sqlite3").rmdir()
    kept.rename(folder / "results.sqlite3")
    page.close()
