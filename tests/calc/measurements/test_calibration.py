"""What was measured takes the place of what is assumed: only where nothing was said, and always with its source."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from calc.catalogue import load
from calc.compute import ComputePlan, compute
from calc.errors import InputError
from calc.hardware import gpu
from calc.measurements.calibration import Calibration, calibrated, calibration, of_records
from calc.measurements.records import Measured, Records
from calc.serving import ServingPlan, serve
from calc.training import TrainingPlan, train
from calc.units import MiB

A100 = {"device": "NVIDIA A100-SXM4-80GB", "kind": "cuda", "catalogue": "a100-sxm-80gb"}
GPU, MODEL = gpu("a100-sxm-80gb"), load("llama-2-7b")
ROOT = Path(__file__).parents[3]


def bandwidth(measured, p20):
    return Measured("2 GiB, bf16", "bandwidth/copy/torch", 2039.0, measured, "GB/s", p20, measured)


def rate(measured, p20, name="bf16/torch"):
    return Measured("8192", f"rate/{name}", 312.0, measured, "TFLOP/s", p20, measured)


@pytest.fixture
def records(tmp_path):
    return Records(tmp_path / "results.sqlite3")


def save(records, run, workload, *rows, environment=A100):
    records.begin(run, workload, {}, environment)
    for row in rows:
        records.add(run, row)


@pytest.fixture
def measured(records):
    """Three runs of each rate, and one of CUDA and framework overhead."""
    for at, (median, low) in enumerate(((1700.0, 1650.0), (1800.0, 1790.0), (1750.0, 1740.0))):
        save(records, f"bandwidth-{at}", "memory-bandwidth", bandwidth(median / 2, low / 2), bandwidth(median, low))
    for at, (median, low) in enumerate(((250.0, 240.0), (260.0, 258.0), (255.0, 251.0))):
        save(
            records, f"rate-{at}", "matmul-rate", rate(median, low), rate(20.0, 19.0), rate(300.0, 299.0, "fp16/torch")
        )
    overhead = (
        Measured("a process", "context", 512 * MiB, 400 * MiB, "bytes"),
        Measured("small", "workspace", 8_519_680, 16 * MiB, "bytes"),
        Measured("small", "fragmentation over peak", 0.05, 0.02, "ratio"),
    )
    save(records, "overhead", "context-and-workspace", *overhead)
    peaks = [
        Measured("2 layers", f"peak/{name}", 1000, value, "bytes")
        for name, value in (("forward", 1010), ("step", 1030))
    ]
    save(records, "peaks", "saved-activations", *peaks, Measured("2 layers", "activations", 1000, 5000, "bytes"))
    return records


def figures(records):
    return {figure.name: figure for figure in of_records(GPU, records).figures}


def test_an_efficiency_is_the_median_of_the_runs_and_its_careful_end_the_lowest(measured):
    found = figures(measured)
    assert (found["bandwidth_efficiency"].point, found["bandwidth_efficiency"].bound) == (1750 / 2039, 1650 / 2039)
    assert (found["compute_efficiency"].point, found["compute_efficiency"].bound) == (255 / 312, 240 / 312)


def test_an_overhead_is_measured_and_its_careful_end_the_highest(measured):
    found = figures(measured)
    assert (found["context_mib"].point, found["workspace_mib"].bound) == (400, 16)
    assert found["fragmentation_percent"].point == pytest.approx(
        2 + 2
    )  # reserved, and allocated, beyond what comes before
    assert found["fragmentation_percent"].bound == pytest.approx(2 + 3)


def test_where_a_figure_is_from_is_told(measured):
    source = figures(measured)["bandwidth_efficiency"].source
    assert source.startswith("memory-bandwidth on NVIDIA A100-SXM4-80GB, 3 runs, the last of 20")


def test_results_of_other_devices_and_of_traces_count_nothing(records):
    save(records, "a", "memory-bandwidth", bandwidth(1700.0, 1650.0), environment=A100 | {"catalogue": "h100-sxm-80gb"})
    save(
        records,
        "b",
        "memory-bandwidth",
        bandwidth(5.0, 4.0)._replace(predicted=None),
        environment={"device": "cpu", "kind": "cpu"},
    )
    save(records, "c", "memory-bandwidth", bandwidth(5.0, 4.0)._replace(predicted=None))
    assert of_records(GPU, records) == Calibration("a100-sxm-80gb", ())


def test_a_rate_above_the_data_sheet_counts_as_all_of_it(records):
    save(records, "a", "memory-bandwidth", bandwidth(2100.0, 2050.0))
    assert figures(records)["bandwidth_efficiency"].point == 1.0


@pytest.mark.parametrize("at", ["point", "bound"])
def test_serving_takes_its_times_from_what_was_measured(measured, at):
    found = of_records(GPU, measured)
    plain = ServingPlan(context=4096, times="roofline")
    plan, notes = calibrated(plain, found, at)
    slow, fast = serve(MODEL, plan, GPU), serve(MODEL, plain, GPU)
    share = {"point": 1750, "bound": 1650}[at] / 2039
    assert slow.speed.tpot_s == pytest.approx(fast.speed.tpot_s / share)
    assert slow.kv_bytes == fast.kv_bytes
    assert [note.split()[1] for note in notes] == ["compute_efficiency", "bandwidth_efficiency"]


def test_training_takes_its_overheads_from_what_was_measured(measured):
    plan, notes = calibrated(TrainingPlan(), of_records(GPU, measured), "bound")
    before, after = train(MODEL, TrainingPlan(), GPU), train(MODEL, plan, GPU)
    assert after.peak_bytes == before.peak_bytes
    assert after.overhead.context == 400 * MiB
    assert after.overhead.workspace == 16 * MiB
    assert after.overhead.fragmentation == pytest.approx(0.05 * after.peak_bytes, abs=1)
    assert len(notes) == 3


def test_an_mfu_that_was_measured_gives_the_time(records):
    save(
        records, "a", "flops", Measured("medium Llama", "MFU of the data sheet's peak", None, 0.5, "ratio", 0.45, 0.55)
    )
    plan, _ = calibrated(ComputePlan(), of_records(GPU, records), "point")
    assert plan.mfu == 0.5
    assert compute(MODEL, plan, GPU).causal.seconds == pytest.approx(
        compute(MODEL, ComputePlan(), GPU).causal.seconds * 0.4 / 0.5
    )


def test_what_the_user_said_stays(measured):
    plan, notes = calibrated(ServingPlan(compute_efficiency=0.5), of_records(GPU, measured), "point")
    assert plan.compute_efficiency == 0.5
    assert len(notes) == 1


def test_off_changes_nothing_and_nothing_measured_says_so(measured, records):
    found = of_records(GPU, measured)
    plan = ServingPlan()
    assert calibrated(plan, found, "off") == (plan, ())
    same, notes = calibrated(plan, calibration([], "h100-sxm-80gb"), "point")
    assert same == plan
    assert notes == ("calibrated: nothing that was measured on h100-sxm-80gb is here, so nothing is changed",)
    with pytest.raises(InputError, match="needs a GPU"):
        of_records(None, records)


def command(*words, code=0):
    done = subprocess.run([sys.executable, "-m", "calc", *words], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == code, done.stderr
    return done


def test_the_command_line_uses_them_when_asked(measured, monkeypatch):
    monkeypatch.setenv("PLUMBLINE_DATA", str(measured.path.parent))
    words = ("serve", "llama-2-7b", "--gpu", "a100-sxm-80gb", "--times", "roofline", "--format", "json")
    plain, found = (json.loads(command(*words, *more).stdout) for more in ((), ("--calibrated", "point")))
    assert found["tpot_s"] == pytest.approx(plain["tpot_s"] * 2039 / 1750)
    assert found["calibration"][1].startswith(
        "calibrated: bandwidth_efficiency is 0.8583 (median 0.8583, careful end 0.8092)"
    )
    assert "calibration" not in plain
    assert "calibration: calibrated: compute_efficiency" in command(*words[:6], "--calibrated", "bound").stdout
    assert (
        "--calibrated: 'on' is not allowed; it must be one of off, point, bound"
        in command(*words, "--calibrated", "on", code=2).stderr
    )
    assert "calibrated: it needs a GPU" in command("serve", "llama-2-7b", "--calibrated", "point", code=2).stderr
