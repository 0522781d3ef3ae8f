"""Number formats: the bits, the values they can have, and what rounding to them loses."""

from __future__ import annotations

from typing import Any, Literal

import streamlit as st
from pydantic import BaseModel, ConfigDict, Field

from calc.errors import InputError
from calc.number_formats import NumberFormat, RoundingError, example, formats, number_format, rounding_error
from pages.ui import charts, scenario, widgets
from pages.ui.charts import Curve
from pages.ui.numbers import Figure, Numbers, figures

Kind = Literal["weights", "activations"]


class FormatChoice(BaseModel):
    """A format, the value at which its spacing is asked, and what is rounded to it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number_format: str = Field("fp8-e4m3", description="one of the formats of the table below")
    spacing_at: float = Field(1.0, ge=0, le=1e38, description="a value, before the scale")
    rounded: Kind = Field(
        "weights",
        description="weights: normal, of deviation 0.02; activations: normal, with a few features 20 times larger",
    )


@st.cache_data(show_spinner=False, max_entries=2)
def _errors(kind: Kind) -> dict[str, RoundingError]:
    """The error of each format; the arrays are the same each time."""
    values = example(kind)
    return {form.name: rounding_error(values, form.name) for form in formats()}


def show(numbers: Numbers) -> None:
    """One format in full, then all formats by their error."""
    widgets.ask_row(FormatChoice, list(FormatChoice.model_fields))
    choice = scenario.current().of(FormatChoice)
    form = number_format(choice.number_format, "number_format")
    st.markdown(_bits(form))
    figures(_figures(form, choice.spacing_at, numbers))
    if form.scale:
        st.markdown(f"Scale: {form.scale}.")
    if form.levels:
        charts.title(f"The {len(form.levels)} values of {form.name}, before the scale, in order")
        points = list(enumerate(form.levels))
        said = f"The {len(form.levels)} values of {form.name} from {form.min:g} to {form.max:g}"
        charts.curves([Curve(form.name, points)], "place", "", numbers, f"levels of {form.name}", said, log=False)
    st.caption(f"Source: {form.source}")
    charts.title(f"What rounding {choice.rounded} loses, by format")
    st.dataframe(_table(choice.rounded), hide_index=True, alt=f"Error of {choice.rounded} rounded to each format")


def _bits(form: NumberFormat) -> str:
    """The bits of one value: sign, exponent and mantissa; of a table or whole number, its digits."""
    if form.kind == "float":
        exponent, mantissa = "e" * form.exponent, "m" * form.mantissa
        drawn = f":red-background[s] :green-background[{exponent}]"
        drawn += f" :blue-background[{mantissa}]" if mantissa else ""
        return f"{drawn} sign, exponent, mantissa"
    said = "place in a table" if form.kind == "table" else "whole number"
    return f":blue-background[{'b' * form.bits}] {said}"


def _figures(form: NumberFormat, at: float, numbers: Numbers) -> list[Figure]:
    if at > form.max:
        raise InputError.of("spacing_at", at, f"the largest value of {form.name} is {form.max:g}")
    found = [
        Figure("Bits a value", f"{form.bits_per_weight:g}", "with its share of the block's scales"),
        Figure("Largest", f"{form.max:.6g}", "before the scale"),
        Figure(f"Spacing at {at:g}", f"{form.spacing(at):.6g}", "to the next value further from zero"),
    ]
    if form.smallest_normal is not None:
        help = f"smallest with all its digits: {form.smallest_normal:.6g}; below lie the subnormals"
        found.append(Figure("Smallest above 0", f"{form.smallest_subnormal or form.smallest_normal:.6g}", help))
    return found


def _table(kind: Kind) -> dict[str, list[Any]]:
    errors = _errors(kind)
    forms = formats()
    return {
        "Format": [form.name for form in forms],
        "Bits a value": [form.bits_per_weight for form in forms],
        "Relative error (rms)": [f"{errors[form.name].relative_rms:.3%}" for form in forms],
        "Signal to noise (dB)": [f"{errors[form.name].signal_to_noise_db:.1f}" for form in forms],
        "Became 0": [f"{errors[form.name].became_zero:.3%}" for form in forms],
        "Largest": [f"{form.max:g}" for form in forms],
    }
