"""What the server adds to Streamlit's own: who may ask by which name, headers of every answer, and routes of its own.

Streamlit checks Host (`server.allowedHosts`) and Origin of its WebSocket only, and sends no header that keeps a page out of frames.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from streamlit import config
from streamlit.web.server.starlette.starlette_websocket import is_host_allowed

ACCOUNT: Final = (
    "x-plumbline-account"  # of a WebSocket: whose the program at its other end is; only this server sets it
)
OTHER: Final = "other"
# no other site frames a page, reads an answer, or learns the address, which holds the scenario
_HEADERS: Final = (
    (b"x-frame-options", b"DENY"),
    (b"content-security-policy", b"frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_OWN_SITE: Final = (
    None,
    "same-origin",
    "none",
)  # Sec-Fetch-Site of this site's pages, of an address bar, and of no browser
_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED: Final = "01"


def middleware() -> list[Middleware]:
    """What every request passes before Streamlit and the routes below see it."""
    return [Middleware(Guard)]


def routes() -> list[BaseRoute]:
    """Routes next to Streamlit's."""
    from pages.api.routes import routes

    return routes()


class Guard:
    """Refuses what another name or another site asks, adds the headers, and notes whose program opened a WebSocket."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._app({**scope, "headers": _with_account(scope)}, receive, send)
        elif scope["type"] == "http":
            complaint = refused(scope["method"], Headers(scope=scope))
            app = PlainTextResponse(complaint, 403) if complaint else self._app
            await app(scope, receive, _with_headers(send))
        else:
            await self._app(scope, receive, send)


def refused(method: str, headers: Headers) -> str:
    """Why a request is not answered: its Host is no name of this server, or another site's page sent it; "" when it is.

    The second follows the resource isolation policy of Fetch Metadata (https://www.w3.org/TR/fetch-metadata/): a link may lead here,
    nothing else of another site may. Older browsers send Origin alone.
    """
    host = headers.get("host")
    if not is_host_allowed(host):
        names = ", ".join(config.get_option("server.allowedHosts"))
        return f"This server answers to {names}; start it with --server.allowedHosts NAME for another name.\n"
    if headers.get("sec-fetch-site") not in _OWN_SITE:
        is_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") in (None, "document")
        if not is_link or method not in ("GET", "HEAD"):
            return "Another site's page may link here and no more.\n"
    origin = headers.get("origin")
    if method not in ("GET", "HEAD", "OPTIONS") and origin and origin.partition("://")[2] != host:
        return "Another site's page may link here and no more.\n"
    return ""


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *_HEADERS]}
        await send(message)

    return sent


def _with_account(scope: Scope) -> list[tuple[bytes, bytes]]:
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != ACCOUNT.encode()]
    client, server = scope.get("client"), scope.get("server")
    if client and server and is_other_account(client[1], server[1]):
        headers.append((ACCOUNT.encode(), OTHER.encode()))
    return headers


def is_other_account(port: int, server_port: int, tables: Iterable[str] = _TABLES) -> bool:
    """Whether another account of this machine has the connection from that port to this server: Linux's tables of sockets say whose
    each is. False where it is this account's or root's, comes from elsewhere, or the system has no such tables."""
    for table in tables:
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for _, local, remote, state, *rest in map(str.split, lines):
            ports = int(local.rpartition(":")[2], 16), int(remote.rpartition(":")[2], 16)
            if ports == (port, server_port) and state == _ESTABLISHED and int(rest[3]) not in (os.getuid(), 0):
                return True
    return False
