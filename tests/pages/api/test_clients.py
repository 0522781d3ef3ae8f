"""Clients that others wrote ask every question: one generated from the OpenAPI description, and the official client of MCP."""

import asyncio
import importlib
import json
import subprocess
import sys

import pytest
from mcp import ClientSession, StdioServerParameters, stdio_client
from starlette.applications import Starlette
from starlette.testclient import TestClient

from calc.commands import COMMANDS
from pages.api import openapi, questions
from pages.api.routes import routes

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("clients")]


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """The package that openapi-python-client makes of the description, and its client, which asks the app in this process."""
    folder = tmp_path_factory.mktemp("generated")
    (folder / "description.json").write_text(json.dumps(openapi.description()))
    (folder / "config.yml").write_text("post_hooks: []")
    words = "generate --path description.json --output-path plumbline_client --meta none --config config.yml"
    made = subprocess.run(
        [sys.executable, "-m", "openapi_python_client", *words.split()], cwd=folder, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    assert "WARNING" not in made.stdout + made.stderr
    sys.path.insert(0, str(folder))
    try:
        package = importlib.import_module("plumbline_client")
        client = package.Client(base_url="http://testserver", raise_on_unexpected_status=True)
        yield client.set_httpx_client(TestClient(Starlette(routes=routes())))
    finally:
        sys.path.remove(str(folder))


def operation(name):
    return importlib.import_module(f"plumbline_client.api.default.{name.replace('-', '_')}")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_generated_client_asks_each_question(generated, name):
    body = openapi.example(COMMANDS[name])
    kind = "".join(word.capitalize() for word in name.split("-"))
    model = getattr(importlib.import_module("plumbline_client.models"), f"{kind}Body")
    answer = operation(name).sync_detailed(client=generated, body=model.from_dict(body))
    assert answer.status_code == 200
    assert answer.parsed.to_dict() == json.loads(questions.by_body(name, body))


@pytest.mark.parametrize("name", questions.LISTS)
def test_a_generated_client_reads_each_list(generated, name):
    found = operation(name).sync(client=generated)
    assert [each.to_dict() for each in found] == json.loads(questions.by_parameters(name, {}))


def test_a_generated_client_reads_what_is_refused(generated):
    body = importlib.import_module("plumbline_client.models").ParamsBody.from_dict({"model": "no-such-model"})
    answer = operation("params").sync_detailed(client=generated, body=body)
    assert answer.status_code == 422
    assert (answer.parsed.field, answer.parsed.value) == ("model", "'no-such-model'")


async def _listed_and_called():
    start = "import sys; from measure.plumbline import main; sys.exit(main(['mcp']))"
    server = StdioServerParameters(command=sys.executable, args=["-c", start])
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        tools = [tool.name for tool in (await session.list_tools()).tools]
        called = {}
        for name in tools:
            arguments = openapi.example(COMMANDS[name]) if name in COMMANDS else {"search": "llama"}
            called[name] = await session.call_tool(name, arguments)
        refused = await session.call_tool("params", {"model": "no-such-model"})
    return called, refused


def test_the_official_client_of_mcp_lists_and_calls_every_tool():
    called, refused = asyncio.run(_listed_and_called())
    assert sorted(called) == sorted(questions.NAMES)
    for name, result in called.items():
        (content,) = result.content
        assert not result.is_error, content.text
        expected = (
            questions.by_body(name, openapi.example(COMMANDS[name]))
            if name in COMMANDS
            else questions.by_parameters(name, {"search": ["llama"]})
        )
        assert content.text == expected
    assert refused.is_error
    assert "no-such-model" in refused.content[0].text
