"""Bad addresses, closed pipes, an interrupt while modules are read: one line or none, never a traceback or a password."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from calc.breakdown import to_csv
from calc.cli import run
from calc.command_line.tables import answer_json
from calc.errors import InputError
from calc.model.config import from_config, parse_config
from calc.sources.hub import Call, Hub, HubId

ROOT = Path(__file__).parents[2]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}


def command(*words, shell="", **environment):
    """A command in a process of its own; `shell` is what the shell does to its output."""
    line = ["bash", "-c", f'exec "$@" {shell}', "sh", sys.executable, *words]
    return subprocess.run(
        line, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}, check=False, timeout=120
    )


@pytest.mark.parametrize(
    "words", [("-m", "calc", "gpus"), ("-m", "measure", "list"), ("-m", "measure.plumbline", "gpus")]
)
def test_an_interrupt_while_modules_are_read_ends_without_a_traceback(words, tmp_path):
    (tmp_path / "pydantic.py").write_text("raise KeyboardInterrupt")
    code = "import sys; from measure.plumbline import main; sys.exit(main(['gpus']))"
    given = words if words[1] != "measure.plumbline" else ("-c", code)
    done = command(*given, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (done.returncode, done.stderr) == (130, "")


def test_a_closed_standard_output_is_said():
    done = command("-m", "calc", "gpus", shell=">&-")
    assert (done.returncode, done.stderr) == (1, "standard output: it is closed, so that no answer can be written\n")


def test_a_reader_that_leaves_early_is_no_fault():
    done = command("-m", "calc", "gpus", "--format", "json", shell="| head -c 1")
    assert (done.stdout, done.stderr) == ("[", "")


@pytest.mark.parametrize("address", ["http://[bad", "https://user:secret@[::1"])
def test_an_hf_endpoint_that_is_no_address_is_one_line(address):
    done = command("-m", "calc", "params", "hub:owner/name", HF_ENDPOINT=address)
    assert done.returncode == 2
    assert done.stderr.startswith("HF_ENDPOINT: it is no web address")
    assert done.stderr.count("\n") == 1
    assert "secret" not in done.stderr


def test_a_data_folder_of_no_user_is_one_line(monkeypatch):
    from measure.cli import run as measure

    monkeypatch.setenv("PLUMBLINE_DATA", "~nosuchuser/data")
    with pytest.raises(InputError, match="PLUMBLINE_DATA: '~nosuchuser/data' is not allowed; there is no such user"):
        measure(["results"])


def test_a_password_of_an_address_is_in_no_message():
    call = Call(Hub("https://user:secret@hub.example"), HubId("owner/name"), "config.json", 1.0)
    for error in (ValueError("no scheme in https://user:secret@hub.example/x {0}"), TimeoutError()):
        message = str(call.complaint(error))
        assert "secret" not in message
        assert "hub.example" in message


def test_a_number_beyond_what_json_has_is_refused_and_not_written_as_infinity():
    class Answer:
        def as_json(self):
            return {"seconds": float("inf")}

    with pytest.raises(InputError, match=r"beyond 1\.8e308"):
        answer_json(Answer())


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"b": {"a": 1, "a": "1"}}', 'a log: {"a": 1, "a": 2,} and more'])
def test_a_field_given_twice_is_named(text):
    with pytest.raises(InputError, match=r"^a: the config gives it twice, as 1 and as "):
        parse_config(text)


def test_a_field_given_twice_alike_is_one():
    assert parse_config('{"a": [1], "a": [1]}') == {"a": [1]}


def test_few_of_the_fields_that_nothing_reads_are_named():
    config = LLAMA | {f"field_{at}_{'x' * 1000}": at for at in range(2000)}
    unread = from_config(config).unread
    assert unread[-1] == "and 1,940 more"
    assert len(unread) == 61
    assert max(map(len, unread)) <= 80


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\t", "\r"])
def test_a_cell_that_a_spreadsheet_would_run_is_kept_from_it(sign):
    assert to_csv([{"a": f"{sign}1"}], ("a",)).removeprefix("a\n").lstrip('"').startswith("'")


def test_the_configs_json_is_still_json():
    assert json.loads(run(["params", "llama-2-7b", "--format", "json"]))["total"] == 6_738_415_616
