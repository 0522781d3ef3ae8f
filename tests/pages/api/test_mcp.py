"""An agent lists the tools and calls each over standard input; what is wrong comes back as an error, never as a traceback."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from calc import cli
from calc.commands import COMMANDS
from pages.api import mcp, openapi, questions

ROOT = Path(__file__).parents[3]


def ask(method, params=None, number=1):
    return json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params or {}})


def test_an_agent_that_starts_lists_and_calls_is_answered_line_by_line():
    lines = [
        ask("initialize", {"protocolVersion": "2025-03-26", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}),
        json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}),
        ask("tools/list", number="a"),
        ask("tools/call", {"name": "params", "arguments": {"model": "gpt2"}}, 3),
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from measure.plumbline import main; sys.exit(main(['mcp']))"],
        input="\n".join(lines) + "\n", capture_output=True, text=True, cwd=ROOT, timeout=60, check=True,
    )  # fmt: skip
    started, listed, called = map(json.loads, done.stdout.splitlines())
    assert started["result"]["protocolVersion"] == "2025-03-26"
    assert started["result"]["serverInfo"]["name"] == "plumbline"
    assert listed["id"] == "a"
    assert [tool["name"] for tool in listed["result"]["tools"]] == list(questions.NAMES)
    assert called["result"]["content"][0]["text"] == cli.run(["params", "gpt2", "--format", "json"])
    assert called["result"]["isError"] is False


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_tool_answers_its_example(name):
    given = {"name": name, "arguments": openapi.example(COMMANDS[name])}
    answer = mcp.answered(ask("tools/call", given))["result"]
    assert answer["isError"] is False
    assert answer["content"][0]["text"] == questions.by_body(name, given["arguments"])


def test_the_catalogues_are_tools_too():
    answer = mcp.answered(ask("tools/call", {"name": "gpus", "arguments": {"search": "h100"}}))["result"]
    assert {row["name"] for row in json.loads(answer["content"][0]["text"])} >= {"h100-sxm-80gb"}


def test_what_a_question_does_not_take_is_told_to_the_agent():
    answer = mcp.answered(ask("tools/call", {"name": "train", "arguments": {"model": "/etc/passwd"}}))["result"]
    assert answer["isError"] is True
    assert answer["content"][0]["text"].startswith("model: '/etc/passwd' is not allowed; ")


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("{", -32700),
        ("[" * 100_000, -32700),
        ("[]", -32600),
        ('{"id": 1}', -32600),
        (ask("tools/run"), -32601),
        (ask("tools/call", {"name": "measure"}), -32602),
        (ask("tools/call", {"name": "train", "arguments": [1]}), -32602),
        (json.dumps({"jsonrpc": "2.0", "id": 1, "method": "ping", "params": [1]}), -32602),
    ],
)
def test_a_message_that_is_none_is_answered_with_json_rpc_s_code(line, code):
    assert mcp.answered(line)["error"]["code"] == code


def test_a_message_that_is_too_long_is_skipped_and_the_next_one_answered():
    target = io.StringIO()
    mcp.serve(io.StringIO("x" * (3 * mcp.LARGEST) + "\n" + ask("ping") + "\n"), target)
    refused, answered = map(json.loads, target.getvalue().splitlines())
    assert refused["error"]["code"] == -32600
    assert answered == {"jsonrpc": "2.0", "id": 1, "result": {}}
