"""A small Hub on loopback: the few routes that are used, and every way in which they go wrong."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    sent: int = 0


@dataclass
class FakeHub:
    """`files` by name in the one repository; `mode` of a file says how its answers go wrong ("" = well).

    Modes: a status (401), "stall", "drip", "truncate", "cdn" (redirect to another host), "loop", "elsewhere" (a relative redirect),
    "no ranges", "liar" (a body larger than its size says), "unsized", "no commit", "wrong range".
    """

    files: dict[str, bytes] = field(default_factory=dict)
    mode: dict[str, str | int] = field(default_factory=dict)
    error_code: dict[str, str] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def sent(self) -> int:
        return sum(request.sent for request in self.requests)


@contextmanager
def serving() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            request = Request(self.command, self.path, {name.lower(): value for name, value in self.headers.items()})
            hub.requests.append(request)
            try:
                _answer(self, hub, request, body)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.stopped.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _answer(handler: BaseHTTPRequestHandler, hub: FakeHub, request: Request, body: bool) -> None:
    on_cdn = request.path.startswith("/cdn/")
    found = re.fullmatch(r"(?:/cdn)?/owner/name/resolve/([^/]+)/(.+)", request.path)
    if not found:
        return _status(handler, 404, "RepoNotFound")
    revision, file = found.groups()
    moved = file.startswith("moved/")
    file = file.removeprefix("moved/")
    mode = hub.mode.get(file, "")
    if revision not in ("main", COMMIT):
        return _status(handler, 404, "RevisionNotFound")
    if isinstance(mode, int):
        return _status(handler, mode, hub.error_code.get(file, ""))
    if file not in hub.files:
        return _status(handler, 404, "EntryNotFound")
    if mode == "stall":
        hub.stopped.wait(30)
        handler.close_connection = True
        return None
    data = hub.files[file]
    if mode == "loop" or (mode == "elsewhere" and not moved):
        return _redirect(
            handler, request.path if mode == "loop" else f"/owner/name/resolve/{revision}/moved/{file}", data
        )
    if mode == "cdn" and not on_cdn:
        return _redirect(handler, f"http://localhost:{hub.port}/cdn{request.path}", data)
    return _file(handler, hub, request, data, mode, body)


def _status(handler: BaseHTTPRequestHandler, status: int, code: str) -> None:
    handler.send_response(status)
    if code:
        handler.send_header("X-Error-Code", code)
    handler.send_header("X-Repo-Commit", COMMIT)
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def _redirect(handler: BaseHTTPRequestHandler, location: str, data: bytes) -> None:
    handler.send_response(302)
    handler.send_header("Location", location)
    handler.send_header("X-Repo-Commit", COMMIT)
    handler.send_header("X-Linked-Size", str(len(data)))
    handler.send_header("X-Linked-ETag", '"linked"')
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def _file(
    handler: BaseHTTPRequestHandler, hub: FakeHub, request: Request, data: bytes, mode: object, body: bool
) -> None:
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
    begin, part = 0, data
    if asked and mode != "no ranges":
        begin = int(asked[1])
        part = data[begin : int(asked[2]) + 1 if asked[2] else None]
    handler.send_response(206 if asked and mode != "no ranges" else 200)
    if asked and mode != "no ranges":
        start = begin + 1 if mode == "wrong range" else begin
        handler.send_header("Content-Range", f"bytes {start}-{begin + len(part) - 1}/{len(data)}")
    if mode != "no commit":
        handler.send_header("X-Repo-Commit", COMMIT)
    handler.send_header("ETag", f'"{abs(hash(data)):x}"')
    if mode == "liar" and body:
        part = b" " * 30_000_000
    if mode == "unsized" or (mode == "liar" and body):
        handler.close_connection = True
    else:
        handler.send_header("Content-Length", str(len(part)))
    handler.end_headers()
    if not body:
        return
    if mode == "truncate":
        part = part[: len(part) // 2]
        handler.close_connection = True
    step = 1 if mode == "drip" else 2**16
    for at in range(0, len(part), step):
        handler.wfile.write(part[at : at + step])
        request.sent += step
        if mode == "drip" and hub.stopped.wait(0.2):
            handler.close_connection = True
            return
