"""Who may ask this server for what: other names, other sites, other accounts, and clicks on buttons that a page never sent."""

import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from starlette.datastructures import Headers
from streamlit import config
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from pages.ui import server as guard
from pages.ui.measuring import runs
from tests.pages.client import Client, session
from tests.pages.server import Server, serve

pytestmark = pytest.mark.xdist_group("own server")  # one server for all tests
LOCAL = {"host": "localhost:8501"}


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLUMBLINE_DATA", str(tmp_path_factory.mktemp("data")))
        patch.delenv("MEASURE", raising=False)
        with serve() as found:
            yield found


def answer(server: Server, path: str, headers: dict[str, str]) -> tuple[int, dict[str, str], str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + path, headers=headers), timeout=20) as got:
            return got.status, {name.lower(): value for name, value in got.headers.items()}, ""
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read().decode()


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/", "/measure", "/_stcore/health", "/_stcore/host-config"])
def test_no_other_site_can_frame_a_page(own_server: Server, path: str):
    status, headers, _ = answer(own_server, path, {})
    assert status == 200
    assert headers["x-frame-options"] == "DENY"
    assert headers["content-security-policy"] == "frame-ancestors 'none'"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.slow
def test_another_name_that_leads_here_gets_nothing(own_server: Server):
    status, _, body = answer(own_server, "/", {"Host": "rebound.example:8501"})
    assert (status, body.count("\n")) == (403, 1)
    assert "--server.allowedHosts NAME" in body
    port = urlsplit(own_server.url).port
    reached = socket.create_connection(("localhost", port))
    with reached, pytest.raises(InvalidStatus, match="403"):
        connect(f"ws://rebound.example:{port}/_stcore/stream", sock=reached)


@pytest.mark.parametrize(
    ("method", "headers", "allowed"),
    [
        ("GET", {}, True),
        ("GET", {"sec-fetch-site": "same-origin"}, True),
        ("GET", {"sec-fetch-site": "none", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, True),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, True),
        ("POST", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, False),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}, False),
        ("GET", {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}, False),
        ("POST", {"origin": "http://localhost:8501"}, True),
        ("POST", {"origin": "http://localhost:3000"}, False),
        ("PUT", {"origin": "null"}, False),
    ],
)
def test_another_sites_page_may_link_here_and_no_more(method: str, headers: dict[str, str], allowed: bool):
    assert (guard.refused(method, Headers({**LOCAL, **headers})) == "") is allowed


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8501", "[::1]:8501", "LOCALHOST."])
def test_this_machine_is_known_by_its_local_names(host: str):
    names = config.get_option("server.allowedHosts")
    assert names == ["localhost", "127.0.0.1", "::1"]
    assert guard.refused("GET", Headers({"host": host})) == ""
    assert guard.refused("GET", Headers({"host": f"{host}.example"})) != ""
    assert guard.refused("GET", Headers({})) != ""


def test_whose_program_asks_is_read_from_the_tables_of_sockets(tmp_path):
    row = "   {}: 0100007F:{:04X} 0100007F:2135 {} 00000000:00000000 00:00000000 00000000 {:5}        0 1 1"
    rows = [
        row.format(0, 40001, "01", os.getuid()),
        row.format(1, 40002, "01", 54321),
        row.format(2, 40003, "06", 54321),
    ]
    table = tmp_path / "tcp"
    table.write_text("\n".join(["  sl  local_address rem_address   st ... uid", *rows, row.format(3, 40004, "01", 0)]))
    tables = (str(tmp_path / "none"), str(table))
    found = [guard.is_other_account(port, 0x2135, tables) for port in (40001, 40002, 40003, 40004, 40005)]
    assert found == [False, True, False, False, False]
    assert not guard.is_other_account(40002, 80, tables)


def test_another_account_of_this_machine_may_not_measure(monkeypatch):
    monkeypatch.delenv("MEASURE", raising=False)
    headers = {"Host": "localhost:8501", guard.ACCOUNT: guard.OTHER}
    assert runs.refusal(headers, None).startswith("Only the account that serves this page")
    monkeypatch.setenv("MEASURE", "anyone")
    assert runs.refusal(headers, None) == ""


def opened(client: Client, **more: str) -> Client:
    client.redraw(page="measure", query="device=cpu", **more)
    return client


@pytest.mark.slow
def test_a_click_on_a_button_that_the_page_never_sent_starts_nothing(own_server: Server):
    """The ids of widgets follow from their labels and keys: a client that knows the program could name them unseen."""
    with session(own_server.url) as first:
        button = opened(first).widgets["button", "Run"]
    with session(own_server.url) as second:
        opened(second, clicked=button)
        assert ("button", "Run") in second.widgets
        assert ("button", "Cancel") not in second.widgets


@pytest.mark.slow
def test_a_click_on_a_button_shown_as_disabled_starts_nothing(own_server: Server):
    with session(own_server.url, {"X-Forwarded-For": "203.0.113.9"}) as client:
        button = opened(client).widgets["button", "Run"]
        client.redraw(clicked=button)
        assert ("button", "Cancel") not in client.widgets
        assert any("Only a browser on the machine" in text for text in client.texts)
