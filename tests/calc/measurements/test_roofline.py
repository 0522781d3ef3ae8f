"""A kernel stands on the roofline at the FLOPs a byte of its formulas and the rate that was measured."""

import pytest

from calc.measurements.records import Measured, Records
from calc.measurements.roofline import Roof, rooflines

A100 = {"device": "NVIDIA A100-SXM4-80GB", "kind": "cuda", "catalogue": "a100-sxm-80gb"}


def stored(tmp_path, *rows, environment=A100, workload="matmul-rate"):
    records = Records(tmp_path / "results.sqlite3")
    records.begin(f"run-{len(records.runs())}", workload, {}, environment)
    for row in rows:
        records.add(records.runs()[0].id, row)
    return records.rows()


def kernel(name, rate, intensity, case="8192"):
    return (
        Measured(case, f"rate/{name}", 312.0, rate, "TFLOP/s", rate, rate),
        Measured(case, f"intensity/{name}", intensity, None, "FLOP/B"),
    )


def test_the_roofs_are_the_data_sheets_and_what_was_reached(tmp_path):
    copy = Measured("2 GiB", "bandwidth/copy/torch", 2039.0, 1750.0, "GB/s", 1.0, 2.0)
    (found,) = rooflines(
        stored(tmp_path, *kernel("bf16/torch", 250.0, 2730.7), *kernel("bf16/triton", 240.0, 2730.7), copy)
    )
    sheet, reached = found.roofs
    assert (sheet.flops, sheet.bandwidth) == (312e12, 2039e9)
    assert (reached.flops, reached.bandwidth) == (250e12, 1750e9)
    assert [(point.kernel, point.intensity, point.rate) for point in found.points] == [
        ("matmul-rate, bf16/torch", 2730.7, 250e12),
        ("matmul-rate, bf16/triton", 2730.7, 240e12),
    ]


def test_a_kernel_that_is_timed_in_bytes_stands_at_bandwidth_times_intensity(tmp_path):
    rows = stored(
        tmp_path,
        Measured("a", "bandwidth/triad/torch", None, 1800.0, "GB/s", 1.0, 2.0),
        Measured("a", "intensity/triad/torch", 1 / 6, None, "FLOP/B"),
        Measured("a", "bandwidth/copy/torch", None, 1700.0, "GB/s", 1.0, 2.0),  # no FLOPs, so no place on it
        workload="memory-bandwidth",
    )
    (point,) = rooflines(rows)[0].points
    assert point.rate == pytest.approx(300e9)


def test_the_newest_of_a_kernel_counts_and_other_machines_have_their_own(tmp_path):
    stored(tmp_path, *kernel("bf16/torch", 100.0, 10.0))
    stored(tmp_path, *kernel("bf16/torch", 200.0, 10.0))
    rows = stored(tmp_path, *kernel("bf16/torch", 1.0, 10.0), environment={"device": "a processor"})
    gpu, processor = rooflines(rows)
    assert [point.rate for point in gpu.points] == [200e12]
    assert processor.machine == "a processor"
    assert processor.roofs == ()  # neither a data sheet nor a copy


def test_a_machine_without_kernels_has_none(tmp_path):
    assert rooflines(stored(tmp_path, Measured("a", "parameters", 1, 1, "bytes"))) == []


def test_the_roofs_meet_at_the_ridge():
    roof = Roof("a", 300e12, 2e12)
    assert roof.ridge == 150
    assert roof.rate(150) == roof.rate(1e6) == 300e12
    assert roof.rate(1) == 2e12
