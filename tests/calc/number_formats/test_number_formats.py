"""Number formats against ml_dtypes and llama.cpp (recorded), numpy and gguf."""

from __future__ import annotations

import json
from math import isnan
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from calc.errors import InputError
from calc.number_formats import example, formats, number_format, quantize, rounding_error
from calc.number_formats.floats import FP16, FP32
from calc.serving.formats import GGML_BLOCKS

_PUBLISHED = Path(__file__).parents[2] / "published"
_ML = json.loads((_PUBLISHED / "ml_dtypes.json").read_text())
_GGML = json.loads((_PUBLISHED / "ggml_rounding.json").read_text())
_SEARCHED = ("Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "IQ4_NL", "IQ4_XS")


@pytest.mark.parametrize("name", _ML["values"])
def test_every_bit_pattern_has_the_value_that_ml_dtypes_gives_it(name):
    form = number_format(name)
    assert form.encoding
    found = [form.encoding.decode(code) for code in range(2**form.bits)]
    expected = [float(text) for text in _ML["values"][name]]
    assert all(a == b or (isnan(a) and isnan(b)) for a, b in zip(found, expected, strict=True))
    finite = sorted({value for value in expected if abs(value) < float("inf")})
    assert list(form.levels) == finite
    assert (form.min, form.max) == (finite[0], finite[-1])
    assert form.smallest_subnormal == min(value for value in finite if value > 0)
    assert form.has_nan == any(isnan(value) for value in expected)
    assert form.has_infinity == (float("inf") in expected)


@pytest.mark.parametrize("name", _ML["casts"])
def test_rounding_equals_the_casts_of_ml_dtypes(name):
    given, expected = _ML["casts"][name]
    encoding = number_format(name).encoding
    assert encoding
    assert encoding.round(np.array(given)).tolist() == expected


@pytest.mark.parametrize(("name", "kind"), [("fp16", np.float16), ("fp32", np.float32)])
def test_wide_floats_equal_numpy(name, kind):
    form, info = number_format(name), np.finfo(kind)
    assert (form.max, form.smallest_normal, form.smallest_subnormal) == (
        float(info.max),
        float(info.smallest_normal),
        float(info.smallest_subnormal),
    )
    assert form.spacing(1.0) == float(info.eps)
    values = np.random.default_rng(2).standard_normal(4096) * 2.0 ** np.arange(-14, 14).repeat(147)[:4096]
    values = values[np.abs(values) < 60_000]
    assert (quantize(values, name) == values.astype(kind).astype(np.float32)).all()


def test_ties_go_to_the_even_value_and_beyond_the_largest_stays_the_largest():
    assert FP16.round(np.array([2049.0, 2051.0, 1e6, -1e6])).tolist() == [2048.0, 2052.0, 65504.0, -65504.0]
    assert FP32.round(np.array([16777217.0])).tolist() == [16777216.0]


@pytest.mark.parametrize("name", ["Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "mxfp4"])
def test_simple_ggml_types_equal_the_gguf_package(name):
    values = np.concatenate([example(rows=8), np.zeros((1, 1024), np.float32)])
    kind = GGMLQuantizationType[name.upper()]
    with np.errstate(invalid="ignore", divide="ignore"):
        expected = quants.dequantize(quants.quantize(values, kind), kind)
    found = quantize(values, name)
    # gguf divides in fp32, so a value halfway between two may go to the other one
    differing = np.abs(found - expected) > 1e-6 * np.abs(values).max()
    assert differing.mean() < 1e-3
    assert (found[-1] == 0).all()


@pytest.mark.parametrize("kind", ["weights", "activations"])
def test_errors_equal_those_of_llama_cpp_and_are_higher_where_it_searches(kind):
    for name, expected in _GGML["mean_square_error"][kind].items():
        ratio = rounding_error(example(kind), name).rms ** 2 / expected
        if name in _SEARCHED:
            assert 1 < ratio < 1.6, name
        else:
            assert ratio == pytest.approx(1, rel=1e-4), name


def test_bits_of_a_weight_are_those_of_the_files():
    for name, size in _GGML["bytes"].items():
        assert number_format(name).bits_per_weight == 8 * size / example().size, name
    for name, (size, elements) in GGML_BLOCKS.items():
        if name in {form.name for form in formats()}:
            assert number_format(name).bits_per_weight == 8 * size / elements
            assert GGML_QUANT_SIZES[GGMLQuantizationType[name]] == (elements, size)


def test_nvfp4_by_hand():
    """amax 2688 = 448 x 6: the tensor's scale is 1. The second block's scale 1.1 becomes 1.125, so 1.1 x 6 = 6.6 is 5.87 steps: 6."""
    values = np.zeros((2, 16))
    values[0, 0], values[1, :3] = 2688, (6.6, 1.4, -0.2)
    found = quantize(values, "nvfp4")
    assert found[0, 0] == 2688
    assert found[1, :3].tolist() == [6.75, 1.125, 0.0]


def test_the_scale_of_microscaling_is_a_power_of_two():
    values = np.zeros(32)
    values[:3] = 7.0, 1.3, 0.6  # scale 2 ** (2 - 2): 7 is beyond 6
    assert quantize(values, "mxfp4")[:3].tolist() == [6.0, 1.5, 0.5]
    assert quantize(values * 2**100, "mxfp4")[:3].tolist() == [6.0 * 2**100, 1.5 * 2**100, 0.5 * 2**100]


@pytest.mark.parametrize("form", formats(), ids=lambda form: form.name)
def test_what_is_a_level_stays_and_nothing_is_further_off_than_half_a_step(form):
    values = example("activations", 4, 512)
    once = quantize(values, form.name)
    assert once.shape == values.shape
    assert once.dtype == np.float32
    assert quantize(np.zeros((2, 256)), form.name).tolist() == np.zeros((2, 256)).tolist()
    if form.name not in (*_SEARCHED, "nvfp4", "int4", "Q4_1", "Q5_1"):  # whose scales are rounded as well
        again = quantize(once, form.name)
        assert np.abs(again - once).max() <= 2e-3 * np.abs(values).max()


def test_spacing_is_the_gap_to_the_next_level():
    for name in ("fp8-e4m3", "fp8-e5m2", "mxfp4", "nf4", "int8"):
        form = number_format(name)
        for low, high in zip(form.levels, form.levels[1:], strict=False):
            if low >= 0:
                assert form.spacing(low) == pytest.approx(high - low), (name, low)


def test_bad_input_is_named():
    for values, name, text in (
        ([1.0], "fp7", "fp7"),
        ([1.0] * 31, "Q8_0", "blocks of 32"),
        ([float("nan")], "fp16", "finite"),
        ([], "fp16", "some"),
    ):
        with pytest.raises(InputError, match=text):
            quantize(np.array(values), name)


def test_errors_fall_as_bits_rise_and_outliers_cost_wide_blocks_more():
    def loss(name, kind="weights"):
        return rounding_error(example(kind), name).relative_rms

    assert loss("fp16") < loss("bf16") < loss("fp8-e4m3") < loss("fp8-e5m2") < loss("nvfp4") < loss("mxfp4")
    assert loss("Q8_0") < loss("Q6_K") < loss("Q5_K") < loss("Q4_K") < loss("Q3_K") < loss("Q2_K")
    assert loss("int8", "activations") > 4 * loss("int8")
    assert loss("fp8-e4m3", "activations") < 1.05 * loss("fp8-e4m3")
