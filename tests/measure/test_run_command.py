"""The command line of measuring: answers, refusals in one line, and no torch where none is needed."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from calc.measurements.records import Measured, Records, as_csv
from measure.cli import main
from measure.devices import likely, lock_name
from measure.workloads import SUITES, WORKLOADS

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_data(tmp_path, monkeypatch):
    monkeypatch.setenv("PLUMBLINE_DATA", str(tmp_path))


class Done(NamedTuple):
    stdout: str
    stderr: str


@pytest.fixture
def measure(capfd):
    """`python -m measure` in this process: what it printed, once its exit code is as expected."""

    def run(*arguments, code=0):
        capfd.readouterr()
        found = main(arguments)
        done = Done(*capfd.readouterr())
        assert found == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "nonsense"), "NAME: 'nonsense' is not allowed; it must be one of decoder-states, saved-activations"),
        (("run", "decoder-states", "--size", "huge"), "--size: 'huge' is not allowed; it must be one of small, medium"),
        (
            ("run", "decoder-states", "--device", "gpu0"),
            "--device: 'gpu0' is not allowed; it must be auto, cpu, cuda or cuda:N",
        ),
        (("run", "decoder-states", "--seconds", "0"), "--seconds: 0.0 is not allowed"),
        (("run", "decoder-states", "--seconds", "nan"), "--seconds: nan is not allowed"),
        (("run", "decoder-states", "--memory-fraction", "2"), "--memory-fraction: 2.0 is not allowed"),
        (("run", "decoder-states", "--format", "xml"), "--format: 'xml' is not allowed; it must be one of table, json"),
        (
            ("run", "matmul-rate", "--model", "llama-2-7b"),
            "model (llama-2-7b) is not for matmul-rate: saved-activations",
        ),
        (("run", "lora", "--model", "-"), "model: '-' is not allowed"),
        (("run", "standard", "--model", "nonsense"), "MODEL: 'nonsense' is not allowed; it must be a catalogue name"),
        (("run", "lora", "--model", "/dev/zero"), "MODEL: '/dev/zero' is not allowed; it must be a plain file"),
        (("run", "pcie", "--device", "cpu"), "pcie: not measurable here: it needs a GPU; "),
        (("import", "/dev/zero"), "FILE: '/dev/zero' is not allowed; it must be a plain file"),
        (("import", "tests"), "FILE: 'tests' is not allowed; it must be a plain file"),
        (("run",), "the following arguments are required: NAME"),
        (("results", "--workload", "nonsense"), "--workload: 'nonsense' is not allowed"),
        (("devices", "--format", "xml"), "--format: 'xml' is not allowed"),
    ],
)
def test_bad_input_is_one_line_that_says_what_is_allowed(arguments, message, measure):
    done = measure(*arguments, code=2)
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.torch
def test_a_device_that_is_not_there_is_refused_with_those_that_are(measure):
    done = measure("run", "decoder-states", "--device", "cuda:99", code=2)
    assert "--device: 'cuda:99' is not allowed; this machine has " in done.stderr
    assert "cpu" in done.stderr


@pytest.mark.torch
def test_a_run_prints_its_rows_and_results_has_them_again(measure):
    done = measure("run", "decoder-states", "--device", "cpu", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert len(rows) == 150
    assert all(row["predicted"] == row["measured"] and float(row["relative_error"]) == 0 for row in rows)
    assert json.loads(rows[0]["environment"])["kind"] == "cpu"
    assert "step 2 of 2" in done.stderr
    assert (
        measure("results", "--run", rows[0]["run"], "--format", "csv").stdout.splitlines()[:10]
        == done.stdout.splitlines()[:10]
    )
    stored = json.loads(measure("results", "--format", "json").stdout)
    assert [int(row["measured"]) for row in rows] == [row["measured"] for row in stored]


@pytest.mark.torch
def test_devices_tells_what_is_here_and_why_the_rest_is_not(measure):
    answer = json.loads(measure("devices", "--format", "json").stdout)
    assert answer["devices"][-1]["name"] == "cpu"
    assert answer["devices"][-1]["memory_bytes"] > 2**30
    if len(answer["devices"]) == 1:
        assert answer["notes"][0].startswith("no GPU: ")


def test_list_names_the_workloads_and_the_formula_that_each_tests(measure):
    rows = json.loads(measure("list", "--format", "json").stdout)
    assert [row["name"] for row in rows] == [*WORKLOADS, *SUITES]
    assert all(row["tests"] and row["needs"] for row in rows)


def test_someone_elses_results_are_taken_in_and_compared(tmp_path, measure):
    row = Measured("4096", "rate/bf16/torch", 989.5, 790.0, "TFLOP/s")
    theirs = Records(tmp_path / "theirs")
    theirs.begin("one", "matmul-rate", {}, {"device": "NVIDIA H100 80GB HBM3"})
    theirs.add("one", row)
    (tmp_path / "lab.csv").write_text(as_csv(theirs.rows()))
    assert measure("import", str(tmp_path / "lab.csv")).stdout.startswith(
        "1 rows of 1 runs were taken in, from lab.csv"
    )
    assert "is here already" in measure("import", str(tmp_path / "lab.csv"), code=2).stderr
    Records().begin("mine", "matmul-rate", {}, {"device": "a processor"})
    Records().add("mine", row._replace(measured=1.0))
    shown = measure("results", "--compare", "lab.csv", "processor").stdout
    assert "first: NVIDIA H100 80GB HBM3 (from lab.csv)" in shown
    assert (
        json.loads(measure("results", "--compare", "h100", "processor", "--format", "json").stdout)[0]["ratio"]
        == 1 / 790
    )
    assert "--compare: 'mars' is not allowed" in measure("results", "--compare", "mars", "h100", code=2).stderr
    assert "FILE: 'none.csv' is not allowed" in measure("import", "none.csv", code=2).stderr


def test_a_file_that_would_be_waited_for_or_is_too_large_is_not_read(tmp_path, measure):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(10 * 2**30)
    for name in ("pipe", "link"):
        assert "it must be a plain file" in measure("import", str(tmp_path / name), code=2).stderr
    assert (
        "has 10,737,418,240 bytes; such a file has at most"
        in measure("import", str(tmp_path / "sparse"), code=2).stderr
    )
    assert not (tmp_path / "results.sqlite3").exists()


@pytest.mark.torch
def test_what_stops_a_single_workload_is_told_once(tmp_path, measure):
    """A refusal that only the measuring process can make: nothing of the model's layers repeats."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 500}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = measure("run", "lora", "--device", "cpu", "--model", str(tmp_path), code=2)
    assert done.stderr.count("do not repeat") == 1


def test_results_of_a_newer_program_are_refused_in_one_line(tmp_path, measure):
    import sqlite3

    with sqlite3.connect(tmp_path / "results.sqlite3") as connection:
        connection.execute("PRAGMA application_id = 0x504C4D42")
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    assert "is of version 99, newer than this program's" in measure("results", code=2).stderr


def test_without_torch_a_run_says_how_to_get_it(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    command = [sys.executable, "-m", "measure", "run", "decoder-states", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 2
    assert "PyTorch is not installed in this Python" in done.stderr
    assert "Traceback" not in done.stderr


NO_TRITON = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name.split(".")[0] == "triton" else find(name, *rest))
"""


@pytest.mark.torch
def test_without_triton_all_works_and_says_why(tmp_path):
    """As on macOS and Windows, which Triton has no build for."""
    (tmp_path / "sitecustomize.py").write_text(NO_TRITON)

    def measured(*arguments):
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
        command = [sys.executable, "-m", "measure", *arguments, "--format", "json"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert measured("devices")["notes"][-1].startswith("no Triton: it is not installed (it has no build for macOS")
    assert [row["name"] for row in measured("list")] == [*WORKLOADS, *SUITES]
    assert {row["quantity"] for row in measured("run", "paged-decode", "--device", "cpu")} >= {"bandwidth/torch"}


def test_neither_listing_nor_refusing_imports_torch():
    code = "import sys, measure.cli; measure.cli.run(['list']); measure.cli.main(['run', 'x']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"


def test_a_gpus_lock_is_its_own_whatever_number_it_has_in_this_process(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-a1/b")
    assert [lock_name(name) for name in ("cuda:0", "cuda:1", "cuda:2", "cpu")] == [
        "cuda-3",
        "cuda-GPU-a1_b",
        "cuda-2",
        "cpu",
    ]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert lock_name("cuda:0") == "cuda-0"


def test_a_device_that_was_named_is_the_likely_one():
    assert [likely(name) for name in ("cpu", "cuda", "cuda:1")] == ["cpu", "cuda:0", "cuda:1"]
