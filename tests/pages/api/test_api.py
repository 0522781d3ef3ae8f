"""JSON over HTTP gives the command line's bytes, describes itself, and answers what is wrong by field, value and what is allowed."""

import json
from urllib.parse import urlencode

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from calc import cli
from calc.catalogue import load_config
from calc.commands import COMMANDS, flag
from pages.api import openapi, questions
from pages.api.routes import LARGEST, routes


@pytest.fixture(scope="module")
def client():
    return TestClient(Starlette(routes=routes()))


def printed(name, body):
    """What the command line prints for a body."""
    words = [name, *([body["model"]] if body.get("model") else [])]
    words += ["--gpu", body["gpu"]] if body.get("gpu") else []
    for key, value in body.get("plan", {}).items():
        words += (
            [flag(key), str(value)]
            if not isinstance(value, bool)
            else [flag(key) if value else f"--no-{flag(key)[2:]}"]
        )
    return cli.run([*words, "--format", "json"]) + "\n"


def train(model, gpu, **plan):
    return "train", {"model": model, "gpu": gpu, "plan": plan}


H100 = "h100-sxm-80gb"
SCENARIOS = [
    *((name, openapi.example(command)) for name, command in COMMANDS.items()),
    *(("params", {"model": model}) for model in ("gpt2", "llama-2-7b", "qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b-v0.1")),
    ("params", {"model": "llama-2-7b", "plan": {"lora_rank": 16}}),
    *(train("llama-2-7b", H100, dp=dp, zero=zero) for dp in (1, 2, 8) for zero in (0, 1, 2, 3)),
    *(train("meta-llama-3.1-8b", "rtx-4090-24gb", method=method, recompute="full") for method in ("lora", "qlora", "dora")),
    train("qwen3-30b-a3b", H100, dp=8, ep=8, recipe="megatron-bf16", zero=1),
    *(("serve", {"model": "llama-2-7b", "gpu": H100, "plan": {"context": context}}) for context in (1024, 4096)),
    *(
        ("serve", {"model": "meta-llama-3.1-8b", "gpu": "l40s-48gb", "plan": {"engine": engine, "concurrency": 4}})
        for engine in ("logical", "vllm", "sglang", "llama.cpp")
    ),
    *(("serve", {"model": "deepseek-v3", "gpu": "h200-141gb", "plan": {"tp": tp}}) for tp in (8, 16)),
    *(
        ("pipeline", {"plan": {"schedule": schedule, "stages": 4, "microbatches": 8}})
        for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
    ),
    *(("compute", {"model": "gpt2", "gpu": H100, "plan": {"tokens": 10**10, "recompute": how}}) for how in ("none", "full")),
    *(("time", {"model": "llama-2-7b", "gpu": "a100-sxm-80gb", "plan": {"seq": seq}}) for seq in (1024, 2048)),
    *(("scaling", {"plan": {"params": params}}) for params in (10**9, 7 * 10**10)),
]  # fmt: skip


def test_there_are_enough_scenarios():
    assert len(SCENARIOS) >= 50
    assert {name for name, _ in SCENARIOS} == set(COMMANDS)


@pytest.mark.parametrize(("name", "body"), SCENARIOS, ids=lambda part: part if isinstance(part, str) else "")
def test_a_body_and_an_address_give_the_bytes_of_the_command_line(client, name, body):
    wanted = printed(name, body)
    answer = client.post(f"/api/{name}", json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.text == wanted
    given = {**body.get("plan", {}), **{key: body[key] for key in ("model", "gpu") if key in body}}
    query = urlencode({key: str(value).lower() if isinstance(value, bool) else value for key, value in given.items()})
    assert client.get(f"/api/{name}?{query}").text == wanted


@pytest.mark.parametrize("name", questions.LISTS)
def test_the_lists_are_those_of_the_command_line(client, name):
    assert client.get(f"/api/{name}").text == cli.run([name, "--format", "json"]) + "\n"
    assert client.get(f"/api/{name}?search=h100").text == cli.run([name, "--search", "h100", "--format", "json"]) + "\n"
    assert client.get(f"/api/{name}?search=--help").json() == []


def test_a_page_s_link_means_what_the_page_shows(client):
    link = "v=2&model=llama-2-7b&gpu=h100-sxm-80gb&gpus=8&seq=2048"
    shown = client.get(f"/api/train?{link}").json()
    wanted = "recipe amp recompute full optimizer_kernel fused dp 8 zero 3 seq 2048".split()
    plan = dict(zip(wanted[::2], wanted[1::2], strict=True))
    assert shown == json.loads(printed("train", {"model": "llama-2-7b", "gpu": H100, "plan": plan}))


@pytest.mark.parametrize(("text", "value"), [("on", True), ("true", True), ("off", False), ("false", False)])
def test_a_switch_that_may_be_left_out_is_read_from_an_address(client, text, value):
    body = {
        "model": "llama-2-7b",
        "gpu": H100,
        "plan": {"tp": 2, "sequence_parallel": value, "recipe": "megatron-bf16"},
    }
    address = f"/api/train?model=llama-2-7b&gpu={H100}&tp=2&recipe=megatron-bf16&sequence_parallel={text}"
    assert client.get(address).text == printed("train", body)


def test_a_config_in_the_body_is_counted(client):
    answer = client.post("/api/params", json={"model": load_config("llama-2-7b")})
    assert answer.json()["total"] == 6_738_415_616


BAD = [
    ("/api/train?model=llama-2-7b&seq=-1", "seq", "'-1'"),
    ("/api/train?model=llama-2-7b&what=1", "what", ""),
    ("/api/train?model=/etc/passwd", "model", "'/etc/passwd'"),
    ("/api/train?model=../x", "model", "'../x'"),
    ("/api/train?model=meta-llama/Llama-2-7b-hf", "model", "'meta-llama/Llama-2-7b-hf'"),
    ("/api/train", "model", "None"),
    ("/api/train?model=llama-2-7b&gpu=abacus", "gpu", "'abacus'"),
    ("/api/train?model=llama-2-7b&gpu_tflops=x", "gpu_tflops", "'x'"),
    ("/api/train?v=2&seq=many", "", ""),
    ("/api/pipeline?model=llama-2-7b", "model", "'llama-2-7b'"),
    ("/api/models?find=x", "find", "'x'"),
]


@pytest.mark.parametrize(("address", "field", "value"), BAD)
def test_a_wrong_parameter_is_named_with_what_is_allowed(client, address, field, value):
    answer = client.get(address)
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    said = answer.json()
    assert said["status"] == 422
    assert said["field"] == field
    assert value in (said["value"], "")
    assert said["allowed"]
    assert "\n" not in said["detail"]
    assert "Traceback" not in answer.text


WRONG_BODIES = [
    (b"{", 400, "body"),
    (b"\xff\xfe", 400, "body"),
    (b'{"model": Infinity}', 400, "body"),
    (b"[" * 100_000, 400, "body"),
    (b"[" * 100 + b"]" * 100, 400, "body"),
    (b"[]", 422, "body"),
    (b'{"modell": "gpt2"}', 422, "body"),
    (b'{"model": "gpt2", "plan": []}', 422, "plan"),
    (b'{"model": "gpt2", "plan": {"seq": "x"}}', 422, "seq"),
    (b'{"model": "gpt2", "plan": {"sequence": 1}}', 422, "sequence"),
    (b'{"model": ["gpt2"]}', 422, "model"),
    (b'{"model": {"architectures": ["Nothing"]}}', 422, None),
    (b'{"model": "gpt2", "gpu": {"name": "x"}}', 422, "gpu"),
    (b'{"model": "gpt2", "gpu": 3}', 422, "gpu"),
    (b"x" * (LARGEST + 1), 413, "body"),
]


@pytest.mark.parametrize(("body", "status", "field"), WRONG_BODIES)
def test_a_wrong_body_is_named_with_what_is_allowed(client, body, status, field):
    answer = client.post("/api/train", content=body)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert field in (answer.json()["field"], None)


@pytest.mark.parametrize(
    ("method", "address", "status"),
    [("PUT", "/api/train", 405), ("OPTIONS", "/api/train", 405), ("TRACE", "/api/models", 405),
     ("DELETE", "/api/models", 405), ("POST", "/api/gpus", 405), ("GET", "/api/measure", 404)],
)  # fmt: skip
def test_other_methods_and_questions_are_refused(client, method, address, status):
    answer = client.request(method, address)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    if status == 405:
        assert answer.headers["allow"] == ("GET, POST" if address == "/api/train" else "GET")


def test_it_is_off_where_the_operator_says_so(monkeypatch):
    monkeypatch.setenv("API", "off")
    assert routes() == []


def test_the_description_names_every_question_with_every_field(client):
    described = client.get("/api/openapi.json").json()
    assert set(described["paths"]) == {f"/api/{name}" for name in questions.NAMES}
    for name, command in COMMANDS.items():
        assert set(described["components"]["schemas"][command.plan_name]["properties"]) == set(
            command.plan.model_fields
        )
        asked = {each["name"] for each in described["paths"][f"/api/{name}"]["get"]["parameters"]}
        assert set(command.plan.model_fields) <= asked
    text = json.dumps(described)
    references = {word.split('"')[0] for word in text.split("#/components/schemas/")[1:]}
    assert references <= set(described["components"]["schemas"])


def test_the_page_shows_an_example_of_every_question_that_answers(client):
    page = client.get("/api/").text
    for name, command in COMMANDS.items():
        assert f"/api/{name}" in page
        assert client.post(f"/api/{name}", json=openapi.example(command)).status_code == 200
