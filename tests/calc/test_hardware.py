"""The hardware catalogue: names, units, provenance, and that unknown stays unknown."""

import json
import math

import pytest

from calc.errors import InputError
from calc.hardware import DATA, PEAK_KINDS, chosen_gpu, custom_gpu, find_gpus, gpu, gpus
from calc.units import GB, GiB, MiB
from tests.offenders import each

CONTRACT = [
    *("h100-sxm-80gb", "a100-sxm-80gb", "a100-pcie-40gb", "h200-141gb", "b200-180gb", "rtx-4090-24gb", "rtx-3090-24gb"),
    *("a10-24gb", "l4-24gb", "l40s-48gb", "mi300x-192gb", "v100-sxm-32gb", "t4-16gb"),
]
ALL = list(gpus().values())
each_gpu = each(ALL, lambda one: one.name)

# NVIDIA's and AMD's own data sheets, dense: (bf16 or fp16, TFLOP/s; memory GB/s)
DATA_SHEETS = {
    "h100-sxm-80gb": ("bf16", 989, 3350),
    "a100-sxm-80gb": ("bf16", 312, 2039),
    "a100-pcie-40gb": ("bf16", 312, 1555),
    "a100-sxm-40gb": ("bf16", 312, 1555),
    "a100-pcie-80gb": ("bf16", 312, 1935),
    "a30-24gb": ("bf16", 165, 933),
    "h100-pcie-80gb": ("bf16", 756, 2000),
    "gb200-186gb": ("bf16", 2500, 8000),
    "h200-141gb": ("bf16", 989, 4800),
    "b200-180gb": ("bf16", 2250, 8000),
    "l40s-48gb": ("bf16", 362, 864),
    "v100-sxm-32gb": ("fp16", 125, 900),
    "mi300x-192gb": ("bf16", 1300, 5300),
    "mi250x-64gb": ("bf16", 191.5, 1640),
}
# of high confidence by tables that several people keep, whose figures are rounded; no data sheet was read
SECOND_HAND = {
    *("h100-sxm-96gb", "gh200-96gb", "gh200-141gb", "mi355x-288gb", "mi350x-288gb", "mi325x-256gb", "mi250-64gb"),
    *("gaudi2-96gb", "tpu-v4-32gb", "tpu-v5e-16gb", "tpu-v5p-95gb"),
}


def test_names_are_unique_and_the_contracts_names_exist():
    names = [row["name"] for row in json.loads(DATA.read_text(encoding="utf-8"))["gpus"]]
    assert len(names) == len(set(names)) == len(gpus())
    assert not set(CONTRACT) - set(names)


@each_gpu
def test_a_name_is_lower_case_and_ends_in_the_marketed_memory(one):
    assert one.name == one.name.lower()
    assert one.marketed_bytes is not None
    assert one.name.endswith(f"-{one.marketed_bytes // GB}gb")


@each_gpu
def test_every_row_has_a_source_and_says_where_its_memory_is_from(one):
    assert one.sources
    assert all(one.sources)
    assert one.confidence in ("high", "medium", "low")
    assert one.memory_note
    if one.memory_is_estimate:
        assert "estimate" in one.memory_note or "no driver's figure" in one.memory_note


@each_gpu
def test_memory_lies_between_nine_tenths_of_the_decimal_and_the_binary_reading_of_the_marketed_figure(one):
    marketed = one.marketed_bytes // GB
    assert 0.9 * marketed * GB < one.memory_bytes <= marketed * GiB


@each_gpu
def test_figures_are_in_base_units_and_plausible(one):
    assert all(1e12 < peak < 1e17 for peak in one.peaks.values())
    assert set(one.peaks) <= set(PEAK_KINDS)
    assert one.memory_bandwidth is None or 5e10 < one.memory_bandwidth <= 8e12
    assert one.link_bandwidth is None or 5e10 < one.link_bandwidth <= 9e11  # one way: NVLink 5 is 900 GB/s
    assert one.pcie_bandwidth is None or 1.5e10 < one.pcie_bandwidth < 1.3e11  # one way: generation 3 to 6
    assert one.board_power is None or 50 < one.board_power < 2000


@each_gpu
def test_no_peak_is_given_for_a_format_that_the_matrix_units_do_not_take(one):
    for kind in one.peaks:
        assert one.lacks(kind) is None
        assert kind == "fp32" or one.matrix_precisions is None or kind in one.matrix_precisions


@each_gpu
def test_capability_and_matrix_precisions_agree(one):
    assert (one.vendor == "NVIDIA") == (one.compute_capability is not None)
    if one.compute_capability:
        by_capability = {kind for kind in PEAK_KINDS if kind != "fp32" and not one.lacks(kind)}
        assert by_capability == set(one.matrix_precisions)


@each([one for one in ALL if one.vendor == "NVIDIA"], lambda one: one.name)
def test_dense_peaks_halve_with_each_doubling_of_width_as_tensor_cores_do(one):
    """A figure with sparsity, or one in the wrong column, would break the ratio."""
    for narrow, wide in (("fp8", "bf16"), ("int8", "bf16"), ("bf16", "tf32")):
        if narrow in one.peaks and wide in one.peaks:
            assert one.peaks[narrow] / one.peaks[wide] == pytest.approx(2, rel=0.03)


def test_a_gpu_of_high_confidence_has_its_data_sheet_here():
    high = {name for name, each in gpus().items() if each.confidence == "high"}
    assert high - set(DATA_SHEETS) == SECOND_HAND


@pytest.mark.parametrize(("name", "sheet"), DATA_SHEETS.items())
def test_peaks_and_bandwidth_are_the_data_sheets_dense_figures(name, sheet):
    kind, tflops, gbps = sheet
    assert gpu(name).peak_flops(kind) == tflops * 1e12
    assert gpu(name).memory_bandwidth == gbps * 1e9


def test_the_drivers_figure_is_kept_to_the_byte():
    assert gpu("h200-141gb").memory_bytes == 143156 * MiB
    assert gpu("a100-pcie-40gb").memory_bytes == 40326 * MiB
    assert gpu("h100-sxm-80gb").memory_bytes == int(79.11 * GiB)  # the low end of 79.11 to 79.19


def test_without_a_drivers_figure_memory_is_the_marketed_decimal_and_says_so():
    one = gpu("a100-pcie-80gb")
    assert one.memory_bytes == 80 * GB
    assert one.memory_is_estimate
    assert "lower estimate" in one.memory_note


@pytest.mark.parametrize("name", ["v100-sxm-32gb", "v100-pcie-16gb", "t4-16gb"])
def test_bf16_is_absent_before_compute_capability_8_with_the_reason(name):
    one = gpu(name)
    assert one.peak_flops("bf16") is None
    assert "bf16 needs compute capability 8.0" in one.why_no_peak("bf16")
    assert one.lacks("fp16") is None


def test_unknown_is_none_and_not_zero():
    assert gpu("h100-nvl-94gb").memory_bandwidth is None
    assert gpu("rtx-5070-12gb").peak_flops("bf16") is None
    assert gpu("rtx-5070-12gb").lacks("bf16") is None
    assert gpu("rtx-5070-12gb").why_no_peak("bf16") == "no source gives the dense bf16 peak of rtx-5070-12gb"
    assert gpu("apple-m1-16gb").matrix_precisions is None
    assert "no matrix unit for fp8" in gpu("mi210-64gb").why_no_peak("fp8")


def test_both_fp8_layouts_have_the_peak_of_fp8():
    one = gpu("h100-sxm-80gb")
    assert one.peak_flops("fp8_e4m3") == one.peak_flops("fp8_e5m2") == one.peak_flops("fp8") == 1979e12


def test_a_module_of_two_devices_is_listed_as_one_device():
    one = gpu("mi250x-64gb")
    assert one.memory_bytes == 65520 * MiB
    assert one.target == "gfx90a"
    assert "two devices" in one.notes


@pytest.mark.parametrize(
    ("typed", "meant"), [("h100-sxm-80", "h100-sxm-80gb"), ("4090", "rtx-4090-24gb"), ("mi250x", "mi250x-64gb")]
)
def test_an_unknown_name_gets_near_ones(typed, meant):
    with pytest.raises(InputError, match=meant) as caught:
        gpu(typed, "--gpu")
    assert caught.value.field == "--gpu"
    assert "\n" not in str(caught.value)


def test_a_name_that_is_nothing_like_a_gpu_still_says_how_to_list_them():
    with pytest.raises(InputError, match="calc gpus"):
        gpu("x" * 10_000)


def test_the_search_takes_every_word_in_any_case():
    assert {one.name for one in find_gpus("a100 PCIe")} == {"a100-pcie-40gb", "a100-pcie-80gb"}
    assert {one.architecture for one in find_gpus("hopper")} == {"hopper"}
    assert {one.name for one in find_gpus("gfx942")} == {"mi300x-192gb", "mi325x-256gb"}
    assert len(find_gpus()) == len(gpus())
    assert find_gpus("no such thing") == []


def test_a_gpu_can_be_described_by_hand():
    one = custom_gpu(memory_gib=40, tflops=312, GBps=1555)
    assert (one.memory_bytes, one.peak_flops("bf16"), one.memory_bandwidth) == (40 * GiB, 312e12, 1555e9)
    assert custom_gpu(memory_gib=40).peak_flops("bf16") is None
    assert custom_gpu(tflops=312).memory_bytes is None


def test_figures_by_hand_override_those_of_a_listed_gpu_and_say_so():
    one = chosen_gpu("t4-16gb", memory_gib=15, tflops=60)
    assert (one.name, one.memory_bytes, one.memory_bandwidth) == ("t4-16gb", 15 * GiB, 320e9)
    assert one.peak_flops("fp16") == 60e12
    assert one.peak_flops("bf16") is None  # no figure makes a Turing card take bf16
    assert one.sources[-1] == "given by the user: gpu_memory_gib, gpu_tflops"
    assert one.memory_note == "given by the user"


def test_no_gpu_is_chosen_when_nothing_is_given():
    assert chosen_gpu(None) is None
    assert chosen_gpu("") is None
    assert chosen_gpu("l4-24gb") is gpu("l4-24gb")
    assert chosen_gpu(None, GBps=300).memory_bandwidth == 300e9


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e30])
@pytest.mark.parametrize("field", ["memory_gib", "tflops", "GBps"])
def test_figures_by_hand_must_be_plausible_numbers(field, value):
    with pytest.raises(InputError, match="it must be a number from") as caught:
        custom_gpu(**{field: value}, rename=lambda name: "--" + name.replace("_", "-"))
    assert caught.value.field.startswith("--gpu-")


def test_facts_are_json_with_exact_bytes():
    facts = json.loads(json.dumps(gpu("h100-sxm-80gb").facts(), allow_nan=False))
    assert facts["memory_bytes"] == gpu("h100-sxm-80gb").memory_bytes
    assert facts["peak_flops"]["bf16"] == 989e12
    assert facts["sources"]
