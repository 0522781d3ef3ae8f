"""Units and number formats: GiB is not GB, and sub-byte types count bits."""

from __future__ import annotations

import numpy as np
import pytest

from calc.dtypes import DTYPES, dtype
from calc.errors import InputError
from calc.units import (
    axis_of_bytes,
    ceil_div,
    round_up,
    show_bytes,
    show_bytes_decimal,
    show_count,
    show_energy,
    show_flops,
    show_seconds,
)


def test_gib_and_gb_are_never_mixed():
    assert show_bytes(16 * 2**30) == "16.00 GiB"
    assert show_bytes_decimal(16 * 2**30) == "17.18 GB"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (show_bytes(1023), "1,023 B"),
        (show_bytes(0), "0 B"),
        (show_bytes(2**50 - 2**40), "1,023.00 TiB"),
        (show_bytes(2**50), "1.00 PiB"),
        (show_bytes(3 * 2**59), "1.50 EiB"),
        (show_bytes_decimal(2_500 * 10**15), "2.50 EB"),
        (show_count(6_738_415_616), "6.74 B"),
        (show_count(999), "999"),
        (show_count(15 * 10**14), "1.50 Q"),
        (show_energy(0.0004), "0.4 Wh"),
        (show_energy(0.5), "500 Wh"),
        (show_energy(999.5), "999.50 kWh"),
        (show_energy(1_234), "1.23 MWh"),
        (show_energy(20_057_936), "20.06 GWh"),
        (show_flops(175.57e12), "175.57 TFLOP"),
        (show_seconds(0.00025), "250.00 µs"),
        (show_seconds(7200), "2.00 h"),
        (show_seconds(0.0), "0 s"),
    ],
)
def test_values_are_shown_with_their_unit(shown, expected):
    assert shown == expected


@pytest.mark.parametrize("power", range(7))
def test_an_axis_of_bytes_is_in_the_unit_in_which_its_longest_bar_is_shown(power):
    for base, binary, show in ((1024, True, show_bytes), (1000, False, show_bytes_decimal)):
        size, unit = axis_of_bytes(3 * base**power, binary)
        assert size == base**power
        assert show(3 * base**power) == (f"3.00 {unit}" if power else "3 B")


def test_division_rounds_up_on_integers_of_any_size():
    assert ceil_div(10**30 + 1, 10) == 10**29 + 1
    assert round_up(513, 512) == 1024


@pytest.mark.parametrize(("elements", "bits", "size"), [(3, "int4", 2), (3, "bf16", 6), (1, "fp4", 1), (0, "int4", 0)])
def test_sub_byte_types_round_up_once_at_the_end(elements, bits, size):
    assert DTYPES[bits].bytes_of(elements) == size


@pytest.mark.parametrize(("name", "numpy_name"), [("fp64", "float64"), ("fp32", "float32"), ("fp16", "float16")])
def test_ieee_formats_agree_with_numpy(name, numpy_name):
    ours, theirs = DTYPES[name], np.finfo(numpy_name)
    assert (ours.bits, ours.exponent, ours.mantissa) == (theirs.bits, theirs.iexp, theirs.nmant)
    assert ours.largest == float(theirs.max)


def test_an_unknown_format_names_the_known_ones():
    with pytest.raises(InputError, match=r"kv_dtype: 'bf17' is not allowed; it must be one of .*bf16"):
        dtype("bf17", "kv_dtype")
