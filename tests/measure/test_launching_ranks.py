"""Ranks under torchrun: how they start, how a run of them ends, and that none is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from calc.errors import InputError, validated  # noqa: E402
from measure.devices import Device, resolve  # noqa: E402
from measure.distributed import launch  # noqa: E402
from measure.distributed.launch import launched  # noqa: E402
from measure.distributed.order import Order  # noqa: E402
from measure.run_options import RunOptions  # noqa: E402
from measure.setting import Setting  # noqa: E402
from measure.workloads import WORKLOADS  # noqa: E402
from tests.measure.ranks_misbehaving import behave  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.skipif(sys.platform == "win32", reason="needs process groups")]
SCRIPT = Path(__file__).with_name("ranks_misbehaving.py")
ROOT = SCRIPT.parent.parent.parent


@pytest.mark.parametrize(
    ("behaviour", "error", "message"),
    [
        ("killed", RuntimeError, r"rank 1 was ended by SIGKILL \(out of memory, most likely\)"),
        ("raises", RuntimeError, "rank 1: RuntimeError: the first line the second"),
        ("refuses", InputError, "size: this is refused"),
        ("exits", RuntimeError, "rank 1 ended with exit status 3"),
        ("crowd", RuntimeError, "rank [01]: out of memory"),
    ],
)
def test_a_rank_that_fails_ends_the_run_with_what_it_said(behaviour, error, message):
    kept = []
    with pytest.raises(error, match=message):
        behave(behaviour, kept.append)
    assert [row.quantity for row in kept] == ["before"] * (behaviour in ("killed", "raises"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_nothing_listens_beyond_the_loopback_interface():
    sockets, elsewhere = behave("addresses")
    assert sockets.measured > 0
    assert elsewhere.measured == 0


def gone(process):
    """Whether no such process runs; one that nobody has waited for yet is done too."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        return not sys.platform.startswith("linux")


def all_gone(processes, seconds=10):
    end = time.monotonic() + seconds
    while not all(gone(process) for process in processes):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_ranks_die_with_the_process_that_started_them_and_leave_no_file(tmp_path):
    processes_folder, temporary = tmp_path / "processes", tmp_path / "temporary"
    processes_folder.mkdir()
    temporary.mkdir()
    parent = subprocess.Popen(
        [sys.executable, SCRIPT, "parent", "hang"],
        env={**os.environ, "PIDS": str(processes_folder), "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert parent.stdout.readline() == "there\n"
        processes = [int(path.name) for path in processes_folder.iterdir()]
        assert len(processes) == 3
        assert len(list(temporary.glob("plumbline-ranks-*"))) == 1
        assert not any(gone(process) for process in processes)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
    assert all_gone(processes)
    assert list(temporary.glob("plumbline-ranks-*")) == []


def test_a_run_that_is_given_up_leaves_no_process_and_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("PIDS", str(tmp_path))
    monkeypatch.setattr(launch.tempfile, "tempdir", str(tmp_path.parent))
    before = set(tmp_path.parent.glob("plumbline-ranks-*"))
    rows = launched(Order(("hang",), "cpu", "small"), 2, lambda fraction, message: None, str(SCRIPT))
    assert next(rows).quantity == "there"
    rows.close()
    assert all_gone([int(path.name) for path in tmp_path.iterdir()])
    assert set(tmp_path.parent.glob("plumbline-ranks-*")) == before


def test_two_ranks_run_on_the_cpu_when_nobody_says_how_many(monkeypatch):
    started = []
    monkeypatch.setattr(launch, "launched", lambda order, ranks, tell: started.append((order, ranks)) or [])
    for ranks in (0, 3):
        setting = Setting(resolve("cpu"), "small", lambda fraction, message: None, ranks=ranks)
        assert list(WORKLOADS["ddp-states"].run(setting)) == []
    assert started == [(Order(("ddp-states",), "cpu", "small"), 2), (Order(("ddp-states",), "cpu", "small"), 3)]


@pytest.mark.parametrize(
    ("count", "ranks", "name", "message"),
    [
        (1, 0, "cuda:0", "this needs two GPUs or more and this machine has 1; --device cpu runs gloo processes"),
        (2, 3, "cuda:0", "3 ranks need as many GPUs and this machine has 2"),
        (4, 0, "cuda:1", "'cuda:1' is not allowed; several GPUs are measured from cuda:0 on"),
    ],
)
def test_too_few_gpus_are_refused_with_a_way_out(monkeypatch, count, ranks, name, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    setting = Setting(Device(name, "cuda", "as if", 2**34), "small", lambda fraction, text: None, ranks=ranks)
    with pytest.raises(InputError, match=message):
        list(launch.run("ddp-states", setting))


def test_torchrun_starts_the_same_with_its_own_flags(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("-m", "measure.distributed", "collectives", "--device", "cpu", "--format", "json"),
        ],
        cwd=ROOT,
        env={**os.environ, "PLUMBLINE_DATA": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 3 * 6 * 3
    assert {row["workload"] for row in rows} == {"collectives"}
    saved = subprocess.run(
        [sys.executable, "-m", "measure", "results", "--format", "json"],
        cwd=ROOT,
        env={**os.environ, "PLUMBLINE_DATA": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert [row["measured"] for row in json.loads(saved.stdout)] == [row["measured"] for row in rows]


@pytest.mark.parametrize(
    ("workload", "ranks", "message"),
    [
        ("ddp-states", 1, "ranks: 1 is not allowed; it must be 2 or more, or 0"),
        ("decoder-states", 2, r"ranks \(2\) is not for decoder-states: collectives, "),
    ],
)
def test_ranks_that_make_no_sense_are_refused(workload, ranks, message):
    with pytest.raises(InputError, match=message):
        validated(RunOptions, {"workload": workload, "ranks": ranks})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nonsense",), "NAME: 'nonsense' is not allowed; it must be one of collectives"),
        (("ddp-states", "--size", "huge"), "--size: 'huge' is not allowed; it must be one of small, medium"),
        (("ddp-states",), "measure.distributed is started by torchrun"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys, monkeypatch):
    from measure.distributed.__main__ import main

    monkeypatch.delenv("RANK", raising=False)
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(message)
    assert printed.count("\n") == 1
