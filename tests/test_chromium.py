"""Where a browser test finds its Chromium, and the one line that it gives when there is none."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import chromium


@pytest.fixture(autouse=True)
def fresh_search():
    chromium.chromium_path.cache_clear()
    yield
    chromium.chromium_path.cache_clear()


def test_the_distributions_chromium_comes_first(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: {"google-chrome": "/opt/chrome"}.get(name))
    assert chromium.chromium_path() == "/opt/chrome"


def test_without_any_chromium_one_line_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    with (
        ThreadPoolExecutor(1) as other,  # Playwright refuses a second instance in the thread of the browser tests
        pytest.raises(chromium.NoChromium, match="apt-get install chromium") as caught,
    ):
        other.submit(chromium.chromium_path).result()
    assert "\n" not in str(caught.value)
