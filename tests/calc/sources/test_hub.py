"""The Hub, against a real HTTP server on loopback that serves ranges, stalls, drips, truncates, redirects and refuses."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from calc.catalogue import load_config
from calc.errors import InputError
from calc.model.config import from_config
from calc.parameters import parameters
from calc.sources.hub import Hub, HubId, NotThere, fetch, parse_id
from calc.sources.hub_weights import find_on_hub
from tests.calc.sources.hub_server import COMMIT, FakeHub, serving

ROOT = Path(__file__).parents[3]
ID = HubId("owner/name")
SLOW = ("stall", "drip", "truncate")  # these end only with the time that a call may take
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "tie_word_embeddings": False,
}


def tensors(head: bool = True) -> dict[str, np.ndarray]:
    shapes = {"model.embed_tokens.weight": (32, 8), "model.norm.weight": (8,), "lm_head.weight": (32, 8)}
    for layer in (0, 1):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{name}_proj.weight": (8, 8) for name in "qo"}
        shapes |= {f"{at}self_attn.{name}_proj.weight": (4, 8) for name in "kv"}
        shapes |= {f"{at}mlp.{name}_proj.weight": (16, 8) for name in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (8, 16)}
        shapes |= {f"{at}{name}_layernorm.weight": (8,) for name in ("input", "post_attention")}
    return {name: np.zeros(shape, np.float16) for name, shape in shapes.items() if head or "head" not in name}


@pytest.fixture
def server():
    with serving() as hub:
        hub.files["config.json"] = json.dumps(CONFIG).encode()
        yield hub


@pytest.fixture
def hub(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return Hub(server.endpoint, str(tmp_path / "cache"), seconds=8.0, stored_seconds=8.0)


def complaint(hub: Hub, hub_id: HubId = ID, stored: bool = False) -> str:
    """The one line about a failed call, which ends in time."""
    start = time.monotonic()
    with pytest.raises(InputError) as caught:
        find_on_hub(hub_id, stored, hub)
    assert time.monotonic() - start < hub.stored_seconds + 1
    text = str(caught.value)
    assert "\n" not in text
    assert "hf_secret" not in text
    return text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("meta-llama/Llama-2-7b-hf", HubId("meta-llama/Llama-2-7b-hf")),
        ("owner/name@refs/pr/1", HubId("owner/name", "refs/pr/1")),
        ("owner/name@v1.0", HubId("owner/name", "v1.0")),
        ("owner/name/model-Q4_K_M.gguf", HubId("owner/name", "main", "model-Q4_K_M.gguf")),
        ("owner/name@dev/sub/a.safetensors", HubId("owner/name", "dev", "sub/a.safetensors")),
    ],
)
def test_an_id_is_understood(text, expected):
    assert parse_id(text) == expected


@pytest.mark.parametrize(
    "text",
    """name owner/ /name owner/name/ owner/na--me owner/..name owner/name.git ../name owner/name@ owner/name@../x owner/na?me
    owner/name/x.bin -owner/name owner/name/../x.gguf owner/name@a/../b öwner/name http://owner/name""".split(),
)
def test_what_is_no_id_is_refused_before_any_request(text):
    assert parse_id(text) is None


def test_a_config_is_fetched_once_and_its_revision_told(server, hub):
    found = find_on_hub(ID, hub=hub)
    spec = found.spec()
    assert found.config == CONFIG
    assert spec.name == "owner/name"
    assert f"revision {COMMIT}" in spec.assumptions[0]
    assert server.endpoint in spec.assumptions[0]
    gets = [request for request in server.requests if request.method == "GET"]
    find_on_hub(ID, hub=hub)
    assert [request for request in server.requests if request.method == "GET"] == gets


FP8 = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}


def test_modelopts_declaration_next_to_the_config_is_read_at_the_same_commit(server, hub):
    server.files["hf_quant_config.json"] = json.dumps(FP8).encode()
    found = find_on_hub(ID, hub=hub)
    assert found.config["quantization_config"] == {**FP8, "quant_method": "modelopt"}
    assert parameters(found.spec()).stored_bytes < parameters(from_config(CONFIG)).stored_bytes
    asked = [request.path for request in server.requests if request.path.endswith("hf_quant_config.json")]
    assert asked
    assert all(COMMIT in path for path in asked)


def test_a_config_that_declares_its_own_quantisation_is_not_asked_for_another(server, hub):
    server.files["config.json"] = json.dumps({**CONFIG, "quantization_config": {"quant_method": "fp8"}}).encode()
    find_on_hub(ID, hub=hub)
    assert not any("hf_quant_config" in request.path for request in server.requests)


@pytest.mark.parametrize("mode", [503, "truncate"])
def test_a_declaration_that_cannot_be_had_is_said_and_the_config_answers(server, hub, mode):
    server.files["hf_quant_config.json"] = json.dumps(FP8).encode()
    server.mode["hf_quant_config.json"] = mode
    found = find_on_hub(ID, hub=replace(hub, seconds=1.0))
    assert found.config == CONFIG
    assert any("hf_quant_config.json" in note for note in found.notes)


@pytest.mark.parametrize("text", [b"[1]", b"{", b"\xff\xfe"])
def test_a_declaration_that_is_none_is_said(server, hub, text):
    server.files["hf_quant_config.json"] = text
    found = find_on_hub(ID, hub=hub)
    assert found.config == CONFIG
    assert found.notes


def test_the_token_goes_to_the_hub_and_not_to_another_host(server, hub):
    server.mode["config.json"] = "cdn"
    assert find_on_hub(ID, hub=hub).config == CONFIG
    on_hub = [request for request in server.requests if not request.path.startswith("/cdn/")]
    on_cdn = [request for request in server.requests if request.path.startswith("/cdn/")]
    assert [(r.method, r.headers.get("authorization")) for r in on_hub] == [("HEAD", "Bearer hf_secret")] * len(on_hub)
    assert on_cdn
    assert not any("authorization" in request.headers for request in on_cdn)


def test_a_relative_redirect_is_followed(server, hub):
    server.mode["config.json"] = "elsewhere"
    assert find_on_hub(ID, hub=hub).config == CONFIG


@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        (401, "", "access is refused (401)"),
        (401, "RepoNotFound", "access is refused (401)"),
        (403, "GatedRepo", "accept its terms on"),
        (404, "RepoNotFound", "no such model"),
        (404, "EntryNotFound", "has no config.json at revision main"),
        (404, "", "no such model"),
        (429, "", "too many requests (429)"),
        (500, "", "the server has a problem (500)"),
        (503, "", "the server has a problem (503)"),
        (418, "", "it answers 418"),
        ("loop", "", "redirects without end"),
        ("no commit", "", "check HF_ENDPOINT and any proxy"),
        ("unsized", "", "of unknown size"),
        ("stall", "", "was not read within 1 s"),
        ("drip", "", "was not read within 1 s"),
        ("truncate", "", "config.json was not read within 1 s"),
    ],
)
def test_what_goes_wrong_is_one_line_that_says_what_to_do(server, hub, mode, code, words):
    server.mode["config.json"] = mode
    server.error_code["config.json"] = code
    assert words in complaint(replace(hub, seconds=1.0) if mode in SLOW else hub)


def test_an_unknown_revision_is_named(hub):
    assert "it has no revision 'v9'; leave @v9 out" in complaint(hub, replace(ID, revision="v9"))


def test_a_config_too_large_is_refused_before_it_is_read(server, hub):
    server.files["config.json"] = b" " * (8 * 2**20 + 1)
    assert "8,388,609 bytes; at most 8,388,608" in complaint(hub)
    assert server.sent == 0


def test_a_body_larger_than_its_size_says_is_cut_off(server, hub):
    server.mode["config.json"] = "liar"
    assert "larger than its size says" in complaint(hub)
    assert server.sent < 25_000_000


@pytest.mark.parametrize("text", [b"<html></html>", b"", b"[1]", b'{"a":' * 100_000, b"\xff\xfe"])
def test_what_is_no_config_is_refused(server, hub, text):
    server.files["config.json"] = text
    assert "config" in complaint(hub)


def test_the_cache_answers_when_the_hub_cannot_be_reached(server, hub):
    find_on_hub(ID, hub=hub)
    server.mode["config.json"] = 503
    assert "read from the cache, because" in find_on_hub(ID, hub=hub).assumptions[0]
    server.mode["config.json"] = "stall"
    found = find_on_hub(ID, hub=replace(hub, seconds=1.0))
    assert found.config == CONFIG
    assert f"revision {COMMIT} (read from the cache, because" in found.assumptions[0]
    server.mode["config.json"] = 401
    assert "access is refused" in complaint(hub)


def test_an_endpoint_that_is_no_address_is_named(hub):
    assert "HF_ENDPOINT must be one" in complaint(replace(hub, endpoint="hub"))


def test_nobody_at_the_endpoint_is_said(hub):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert "cannot be reached; check the network and HF_ENDPOINT" in complaint(replace(hub, endpoint=nobody))


def test_a_file_that_is_not_there_is_told_apart(hub):
    with pytest.raises(NotThere):
        fetch(ID, "absent.json", hub=hub)


# --- headers by range requests


def test_one_file_is_counted_from_its_header_alone(server, hub):
    many = {f"model.layers.0.mlp.w{at}.weight": np.zeros((4096,), np.float32) for at in range(400)}
    server.files["model.safetensors"] = save(many)
    found = find_on_hub(ID, True, hub)
    assert found.stored.elements == 400 * 4096
    assert found.stored.bytes == 400 * 4096 * 4
    sent = sum(request.sent for request in server.requests if request.path.endswith(".safetensors"))
    assert sent <= 2**17 < len(server.files["model.safetensors"]) // 40


def test_a_long_header_takes_a_second_request(server, hub):
    many = {f"model.layers.0.mlp.{'w' * 200}{at}.weight": np.zeros((1,), np.float32) for at in range(1000)}
    server.files["model.safetensors"] = save(many)
    assert find_on_hub(ID, True, hub).stored.elements == 1000
    ranges = [r.headers["range"] for r in server.requests if r.path.endswith(".safetensors") and r.method == "GET"]
    assert len(ranges) == 2
    assert ranges[1].startswith("bytes=131072-")


def shard(server: FakeHub, count: int = 3) -> int:
    """The tensors in `count` files with their index; returns their bytes."""
    everything = tensors()
    names = sorted(everything)
    weight_map = {name: f"model-{at % count + 1:05}-of-{count:05}.safetensors" for at, name in enumerate(names)}
    for file in set(weight_map.values()):
        server.files[file] = save({name: everything[name] for name in names if weight_map[name] == file})
    size = sum(value.nbytes for value in everything.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    server.files["model.safetensors.index.json"] = json.dumps(index).encode()
    return size


@pytest.mark.parametrize("mode", ["", "cdn", "no ranges"])
def test_shards_are_counted_through_their_index(server, hub, mode):
    size = shard(server)
    server.mode |= {file: mode for file in server.files if file.endswith(".safetensors")}
    stored = find_on_hub(ID, True, hub).stored
    assert (stored.bytes, stored.elements) == (size, size // 2)
    assert all(COMMIT in request.path for request in server.requests if "model" in request.path)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (404, "it has no model-00002"),
        (429, "too many requests"),
        ("stall", "was not read within"),
        ("drip", "was not read within"),
        ("truncate", "broke off"),
        ("wrong range", "does not give a part"),
    ],
)
def test_a_shard_that_cannot_be_read_leaves_the_config_and_says_why(server, hub, mode, words):
    shard(server)
    server.mode["model-00002-of-00003.safetensors"] = mode
    server.error_code["model-00002-of-00003.safetensors"] = "EntryNotFound" if mode == 404 else ""
    found = find_on_hub(ID, True, replace(hub, stored_seconds=1.0 if mode in SLOW else 8.0))
    assert found.config == CONFIG
    assert found.stored is None
    assert words in found.notes[0]


def test_an_index_that_leads_elsewhere_is_refused(server, hub):
    server.files["model.safetensors.index.json"] = b'{"weight_map": {"a": "../../../etc/x.safetensors"}}'
    assert "must be the name of a .safetensors file in the folder" in find_on_hub(ID, True, hub).notes[0]


def test_a_named_file_without_a_config_is_still_counted(server, hub):
    server.files = {"sub/adapter.safetensors": save({"a.weight": np.zeros((3, 5), np.float32)})}
    found = find_on_hub(replace(ID, file="sub/adapter.safetensors"), True, hub)
    assert found.config is None
    assert found.stored.by_dtype() == {"F32": (15, 60)}


# --- as users run it


def calc(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "calc", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def test_the_command_line_asks_the_endpoint_of_the_environment(server, tmp_path):
    shard(server)
    home = str(tmp_path / "home")
    done = calc("params", "owner/name", "--format", "json", HF_ENDPOINT=server.endpoint, HF_HOME=home, HF_TOKEN="hf_x")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    assert answer["total"] == answer["stored"]["elements"] == sum(value.size for value in tensors().values())
    assert answer["stored"]["difference"] == 0
    assert COMMIT in answer["assumptions"][0]
    assert all(
        request.path.startswith("/owner/name/resolve/") for request in server.requests
    )  # and nobody else is told
    assert all(request.headers["authorization"] == "Bearer hf_x" for request in server.requests)
    offline = calc("compute", "owner/name", HF_ENDPOINT=server.endpoint, HF_HOME=home, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert "HF_HUB_OFFLINE is set: read from the cache" in offline.stdout


@pytest.mark.parametrize(("mode", "offline"), [("", "1"), (401, ""), (429, "")])
def test_the_command_line_fails_with_one_line_and_exit_2(server, tmp_path, mode, offline):
    server.mode["config.json"] = mode
    done = calc("train", "owner/name", HF_ENDPOINT=server.endpoint, HF_HOME=str(tmp_path), HF_HUB_OFFLINE=offline)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("MODEL: owner/name on http://127.0.0.1:")
    assert done.stderr.count("\n") == 1


def test_a_model_of_the_catalogue_is_named_when_the_hub_cannot_be_asked(tmp_path):
    done = calc("params", "meta-llama/Meta-Llama-3.1-8B", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert done.stderr.endswith("; the catalogue has it as meta-llama-3.1-8b\n")


def test_a_path_that_exists_wins_over_an_id(server, tmp_path, monkeypatch):
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 7}))
    save_file(tensors(), folder / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    assert load_config("owner/name")["vocab_size"] == 7
    assert server.requests == []
