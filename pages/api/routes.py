"""The addresses under /api. An answer is worked out in a thread, so that pages go on; a complaint is application/problem+json."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from calc.errors import InputError
from pages.api import openapi, questions

LARGEST: Final = 2**20  # bytes of a body
_METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")  # those refused here are a problem too
_DEEPEST: Final = 64  # levels of a body


def routes() -> list[BaseRoute]:
    """What the server adds at /api; nothing with API=off."""
    if os.environ.get("API", "").lower() == "off":
        return []
    return [
        Mount(
            "/api",
            routes=[
                Route("/", _page, methods=["GET"]),
                Route("/openapi.json", _description, methods=["GET"]),
                Route("/{name:path}", _question, methods=_METHODS),
            ],
        )
    ]


def problem(status: int, title: str, error: InputError, headers: dict[str, str] | None = None) -> Response:
    """A complaint, RFC 9457."""
    body = {
        "title": title,
        "status": status,
        "detail": str(error),
        "field": error.field,
        "value": error.value,
        "allowed": error.allowed or str(error),
    }
    return Response(json.dumps(body), status, headers, openapi.PROBLEM)


def _page(request: Request) -> Response:
    return HTMLResponse(openapi.page())


def _description(request: Request) -> Response:
    return _json(json.dumps(openapi.description(), indent=1))


async def _question(request: Request) -> Response:
    name = request.path_params["name"].rstrip("/")
    if name not in questions.NAMES:
        known = f"it must be one of {', '.join(questions.NAMES)}"
        return problem(404, "no such question", InputError.of("question", name, known))
    methods = ("GET",) if name in questions.LISTS else ("GET", "POST")
    if request.method not in (*methods, "HEAD"):
        said = InputError.of("method", request.method, f"it must be one of {', '.join(methods)}")
        return problem(405, "another method", said, {"allow": ", ".join(methods)})
    if request.method != "POST":
        given = {key: request.query_params.getlist(key) for key in request.query_params}
        return await run_in_threadpool(_answered, lambda: questions.by_parameters(name, given))
    try:
        raw = await _body(request)
        body = await run_in_threadpool(_parsed, raw)
    except _TooLarge:
        said = InputError.of("body", f"over {LARGEST:,} bytes", f"it must be at most {LARGEST:,} bytes")
        return problem(413, "a body over 1 MB", said)
    except InputError as error:
        return problem(400, "a body that is no JSON", error)
    return await run_in_threadpool(_answered, lambda: questions.by_body(name, body))


class _TooLarge(Exception):
    pass


async def _body(request: Request) -> bytes:
    """The body, read no further than the limit."""
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > LARGEST:
                raise _TooLarge
            parts.append(part)
    except ClientDisconnect:
        raise InputError("the body ended early", "body") from None
    return b"".join(parts)


def _parsed(raw: bytes) -> Any:
    def refuse(word: str) -> float:
        raise InputError.of("body", word, "JSON has no such number")

    try:
        found = json.loads(raw, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError.of("body", raw[:40].decode(errors="replace"), "it must be JSON") from None
    if _depth(found) > _DEEPEST:
        raise InputError("the body is nested too deeply", "body")
    return found


def _depth(value: Any) -> int:
    deepest, rest = 0, [(value, 1)]
    while rest:
        each, level = rest.pop()
        deepest = max(deepest, level)
        if level > _DEEPEST:
            return level
        parts = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        rest += [(part, level + 1) for part in parts]
    return deepest


def _answered(ask: Callable[[], str]) -> Response:
    try:
        return _json(ask() + "\n")
    except InputError as error:
        return problem(422, "a value that is not allowed", error)


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")
