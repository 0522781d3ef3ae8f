"""Kernel times: the tables against measurements held out of them, the roofline against arithmetic, and what is said of each source."""

import json
from pathlib import Path

import numpy as np
import pytest

from calc.errors import InputError
from calc.hardware import custom_gpu, gpu
from calc.kernel_times import kernel_times
from calc.kernel_times.tables import DATA, index, rows
from calc.kernel_times.work import visible_pairs

PUBLISHED = Path(__file__).parent.parent.parent / "published" / "kernel_times.json"
H100 = gpu("h100-sxm-80gb")


def asked(row):
    """The product's answer for one measured row."""
    times = kernel_times(
        gpu(row["gpu"]), engine=row["engine"] if row["engine"] in ("vllm", "sglang", "trtllm") else None
    )
    given = {name: row[name] for name in row if name not in ("gpu", "engine", "kind", "dtype", "seconds")}
    kind, dtype = row["kind"], row["dtype"]
    if kind in ("nccl", "custom"):
        return times.collective(dtype, given["bytes"], given["ranks"], kernel=kind)
    if kind.startswith("exchange_"):
        return times.expert_exchange(dtype, **given, ranks=8, mode=kind.removeprefix("exchange_"))
    if kind in ("linear_attention", "memory_bound"):
        return getattr(times, kind)(**given)
    if kind.endswith("attention") or kind.startswith("mla"):
        return getattr(times, kind)(**given, kv_dtype=dtype)
    return getattr(times, kind)(**given, dtype=dtype)


def test_the_tables_give_measurements_that_were_held_out_of_them():
    errors = {}
    for row in json.loads(PUBLISHED.read_text(encoding="utf-8"))["rows"]:
        errors.setdefault((row["kind"], row["dtype"]), []).append(abs(asked(row) / row["seconds"] - 1))
    for (kind, dtype), found in errors.items():
        recorded = [
            each["median"]
            for each in rows()
            if (each["kind"], each["dtype"]) == (kind, dtype) and each["held_out"] >= 5
        ]
        # a sample's median strays from the whole's; half as much again is more than three standard errors at these counts
        assert np.median(found) <= 1.5 * max(recorded), (kind, dtype)


def test_the_data_are_small_and_say_where_they_are_from():
    assert sum(path.stat().st_size for path in DATA.iterdir()) <= 1_000_000
    assert index()["license"] == "Apache-2.0"
    assert "aiconfigurator-core 0.12.0" in index()["source"]


@pytest.mark.parametrize("name", index()["gpus"])
def test_the_catalogue_still_has_the_peaks_that_the_tables_were_made_with(name):
    row = index()["gpus"][name]
    facts = gpu(name)
    assert row["peak_flops"] == facts.peaks
    assert row["memory_bandwidth"] == facts.memory_bandwidth
    assert row["link_bandwidth"] == (facts.link_bandwidth or facts.pcie_bandwidth)


def test_the_roofline_is_the_larger_of_compute_and_memory():
    times = kernel_times(H100, "roofline")
    assert times.gemm(4096, 4096, 4096) == pytest.approx(2 * 4096**3 / 989e12)
    assert times.gemm(1, 4096, 4096) == pytest.approx(2 * (4096 + 4096**2 + 4096) / 3350e9)
    assert times.collective("all_reduce", 8 * 2**20, 8) == pytest.approx(2 * 7 / 8 * 8 * 2**20 / 450e9)
    assert times.memory_bound(3350, 3350) == pytest.approx(2e-9)


def test_arrays_broadcast_and_give_what_each_number_gives():
    times = kernel_times(H100)
    m, n = np.array([1, 100, 5000])[:, None], np.array([512, 7000])
    found = times.gemm(m, n, 4096)
    assert found.shape == (3, 2)
    assert [[times.gemm(a, b, 4096) for b in (512, 7000)] for a in (1, 100, 5000)] == found.tolist()
    assert isinstance(times.gemm(8, 8, 8), float)


def test_a_pair_is_counted_once_for_each_key_that_a_query_sees():
    for query, context, window in [(5, 0, 0), (5, 3, 0), (5, 0, 2), (5, 3, 4), (5, 9, 4), (7, 2, 5), (1, 6, 0)]:
        keys = [context + i + 1 for i in range(query)]
        expected = sum(min(each, window) if window else each for each in keys)
        assert visible_pairs(query, context, window, causal=True) == expected
        assert visible_pairs(query, context, 0, causal=False) == query * (context + query)


def test_a_format_that_the_card_lacks_is_refused_with_what_it_runs():
    with pytest.raises(InputError, match=r"fp8 needs compute capability 8.9.*it runs bf16"):
        kernel_times(gpu("a100-sxm-80gb")).gemm(8, 8, 8, dtype="fp8")
    with pytest.raises(InputError, match="it must be one of bf16"):
        kernel_times(H100).gemm(8, 8, 8, dtype="fp7")


def test_a_gpu_without_tables_takes_its_relatives_shares_of_its_own_peaks_and_says_so():
    own, kin = kernel_times(H100), kernel_times(gpu("h100-pcie-80gb"))
    assert own.source == "table h100-sxm-80gb"
    assert own.notes == ()
    assert kin.source == "table h100-sxm-80gb by relation"
    assert "h100-sxm-80gb" in kin.notes[0]
    slower = kin.gemm(8192, 8192, 8192) / own.gemm(8192, 8192, 8192)
    assert slower == pytest.approx(989 / 756, rel=1e-3)
    assert kin.error("gemm")[0] > own.error("gemm")[0]


def test_a_gpu_of_ones_own_without_bandwidth_is_refused():
    with pytest.raises(InputError, match="memory bandwidth"):
        kernel_times(custom_gpu(memory_gib=80, tflops=100))
