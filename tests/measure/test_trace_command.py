"""`python -m measure trace` as a user meets it: a child process, one line of complaint, nothing left running."""

import csv
import json
import subprocess
import sys
import time
from dataclasses import asdict

import psutil
import pytest

from calc.errors import InputError
from measure.cli import main

pytestmark = pytest.mark.torch

SMALL = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


@pytest.fixture
def here(monkeypatch):
    """The trace in this process: what its child is asked and answers, without the seconds that another Python takes to start."""
    from measure.trace import command
    from measure.trace.__main__ import answer

    def observe(config, options, seconds, *_):
        found = json.loads(json.dumps(answer(json.loads(json.dumps({"config": config, "options": asdict(options)})))))
        if "error" in found:
            raise InputError(found["error"], found["field"])
        return found

    monkeypatch.setattr(command, "observe", observe)


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


def test_json_has_the_keys_of_a_prediction_and_parts_that_sum_to_the_peak(small, capsys):
    assert main(["trace", small, "--seq", "128", "--global-batch", "2", "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    for key in (
        "parameters_bytes",
        "gradients_bytes",
        "optimizer_bytes",
        "activations_bytes",
        "overhead_bytes",
        "fits",
    ):
        assert key in answer
    assert answer["phases"][answer["peak_phase"]] == answer["peak_bytes"]
    assert sum(part["value"] for part in answer["components"]) == answer["peak_bytes"]
    assert all(part["unit"] == "bytes" and part["source"].startswith("observed: ") for part in answer["components"])
    assert answer["layers"] == 4


def test_a_gpu_tells_whether_it_fits_with_the_lines_that_no_tensor_shows(small, capsys, here):
    assert (
        main(["trace", small, "--seq", "64", "--gpu-memory-gib", "1", "--context-mib", "600", "--format", "json"]) == 0
    )
    answer = json.loads(capsys.readouterr().out)
    assert answer["overhead_bytes"]["context"] == 600 * 2**20
    assert answer["driver_bytes"] == answer["peak_bytes"] + sum(answer["overhead_bytes"].values())
    assert answer["fits"] is (answer["headroom_bytes"] >= 0) is True


def test_the_ledger_names_modules_and_operations_and_progress_goes_to_standard_error(small, capfd, here):
    assert main(["trace", small, "--seq", "128", "--ledger"]) == 0
    out, err = capfd.readouterr()
    assert "mlp.down_proj mm" in out
    assert "layer 1 (stands for 2)" in out
    assert "running two steps, 3 of 4 layers" in err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--tp", "2"], "--tp: 2 is not allowed; a trace runs 1 only"),
        (["--recipe", "fp8"], "--recipe: 'fp8' is not allowed; a trace runs pure-bf16, amp, fp32, fsdp-bf16 only"),
        (["--recipe", "fsdp-bf16"], "--recipe: 'fsdp-bf16' is not allowed; a trace runs it with --zero 3 only"),
        (["--dp", "2", "--zero", "2"], "--zero: 2 is not allowed; a trace runs 0, 1, 3 only"),
        (["--seq", "0"], "--seq: "),
        (["--layers", "some"], "--layers: 'some' is not allowed"),
        (["--seconds", "-1"], "--seconds: '-1' is not allowed"),
        (["--format", "xml"], "--format: 'xml' is not allowed"),
        (["--optimizer", "muon"], "--optimizer: 'muon' is not allowed"),
        (["--nonsense", "1"], "unrecognized arguments: --nonsense 1"),
    ],
)
def test_what_a_trace_does_not_run_is_refused_by_name(small, capsys, flags, complaint):
    assert main(["trace", small, *flags]) == 2
    out, err = capsys.readouterr()
    assert complaint in err
    assert (out, err.count("\n")) == ("", 1)


def test_what_transformers_cannot_build_is_one_line(tmp_path, capfd, here):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL, "model_type": "no-such-model"}))
    assert main(["trace", str(path)]) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert "does not know this model" in last


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("clip-vit-large-patch14", "CLIPModel reads pictures beside or instead of text"),
        ("snowflake-arctic-embed-m", "BertModel has no head over a vocabulary and so no loss"),
    ],
)
def test_a_model_that_makes_no_step_on_text_is_refused_by_name(name, complaint, capfd, here):
    assert main(["trace", name, "--seq", "64"]) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last == f"MODEL: {complaint}: its step on text alone cannot be run"


def test_more_layers_than_the_model_has_are_refused(small, capfd, here):
    assert main(["trace", small, "--seq", "64", "--layers", "99"]) == 2
    assert capfd.readouterr().err.strip().splitlines()[-1] == "layers: 99 is not allowed; LlamaForCausalLM has 4"


def test_a_trace_that_takes_too_long_is_stopped_and_leaves_nothing_running(small, capfd):
    assert main(["trace", small, "--seconds", "0.3"]) == 2
    assert "--seconds: 0.3 is not allowed; the trace took longer and was stopped" in capfd.readouterr().err
    assert not psutil.Process().children()


def test_the_command_line_imports_no_torch_before_the_child_does():
    code = "import sys, measure, measure.__main__, measure.trace.command; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


NAMED = {"architectures": ["LlamaForCausalLM"], **SMALL}


def test_compare_prints_prediction_and_trace_by_path(tmp_path, capsys, here):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(NAMED))
    assert main(["trace", str(path), "--seq", "64", "--micro-batch", "2", "--compare", "--format", "csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert rows[-1]["path"] == "total"
    assert sum(int(row["traced"]) for row in rows[:-1]) == int(rows[-1]["traced"])
    assert {"parameters/layers/attention/query", "optimizer/layers/mlp/up/moment_2"} <= {row["path"] for row in rows}
    assert all(row["predicted"] == row["traced"] for row in rows)


@pytest.fixture
def attached(tmp_path, monkeypatch):
    """A trace as the page starts it: its config on standard input, which stays open, and events on standard output."""
    monkeypatch.setenv("PLUMBLINE_DATA", str(tmp_path))
    command = [sys.executable, "-m", "measure", "trace", "-", "--seq", "64", "--compare", "--format", "jsonl"]
    with subprocess.Popen(
        [*command, "--attached"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdin.write(json.dumps(NAMED) + "\n")
        process.stdin.flush()
        yield process
        process.kill()


def test_events_tell_how_far_a_trace_is_and_its_answer(attached):
    events = [json.loads(line) for line in attached.stdout if line.strip()]
    assert [event["event"] for event in events] == ["started", "progress", "progress", "answer", "done"]
    assert events[-1]["outcome"] == "finished"
    answer = events[-2]["answer"]
    assert answer["compared"][-1]["traced"] == answer["peak_bytes"]
    assert attached.wait() == 0


def test_a_trace_ends_with_its_standard_input_and_leaves_nothing_running(attached):
    assert json.loads(attached.stdout.readline())["event"] == "started"
    deadline = time.monotonic() + 20
    while not (children := psutil.Process(attached.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    attached.stdin.close()
    assert json.loads(attached.stdout.readlines()[-1]) == {
        "event": "done",
        "outcome": "cancelled",
        "message": "cancelled",
    }
    assert attached.wait() == 1
    assert not any(child.is_running() for child in children)
