"""The sidebar that all pages share: the scenario's model and GPU, and how answers are shown."""

from __future__ import annotations

import streamlit as st

from calc.catalogue import catalogue
from calc.hardware import gpus
from calc.sources.hub import parse_id
from calc.units import show_bytes
from pages.ui import hub_models, link, own_run, scenario
from pages.ui.appearance import CUSTOM, HUB
from pages.ui.fields import fields_of
from pages.ui.scenario import Subject, View
from pages.ui.widgets import ask

_FIGURES = ("gpu_memory_gib", "gpu_tflops", "gpu_GBps")


def draw(*, takes_runs: bool = False) -> None:
    """Draw the sidebar; the scenario holds what it asks. `takes_runs` offers to paste another tool's run."""
    with st.sidebar:
        ask(fields_of(Subject)["model"], "stretch")
        more_of_model()
        ask(fields_of(Subject)["gpu"], "stretch")
        more_of_gpu()
        if takes_runs:
            own_run.ask_run()
        settings()


def settings() -> None:
    """How answers are shown, in one place."""
    fold = st.expander("Settings", key="settings", icon=":material/settings:", on_change="rerun")
    if fold.open:
        with fold:
            for field in fields_of(View).values():
                ask(field, "stretch")


def more_of_model() -> None:
    """What a chosen model needs or says of itself."""
    model = scenario.current().subject.model
    if model == HUB:
        ask(fields_of(Subject)["hub_id"], "stretch")
        if hub_models.is_offline():
            st.caption("HF_HUB_OFFLINE is set: only what is in Hugging Face's cache is read.")
        _ask_the_hub()
    elif model == CUSTOM:
        _own_model()
    elif model in catalogue():
        hub_id = catalogue()[model].hub_id
        st.caption(f"[{hub_id}](https://huggingface.co/{hub_id})")


def _ask_the_hub() -> None:
    """The click before which nothing that a link names is fetched."""
    given = scenario.current().subject.hub_id
    hub_id = parse_id(given or "")
    if hub_id and not hub_models.is_asked_for(hub_id):
        st.button(
            "Ask the Hub", key="ask the hub", on_click=hub_models.ask_for, args=(given,), icon=":material/download:"
        )


def more_of_gpu() -> None:
    """What is known of the chosen GPU, and the figures that a person may give instead."""
    gpu = scenario.current().subject.gpu
    if gpu in gpus():
        _gpu_facts(gpu)
    fold = st.expander("The GPU's figures", expanded=gpu == CUSTOM, key="gpu figures", on_change="rerun")
    if fold.open:
        with fold:
            for name in _FIGURES:
                ask(fields_of(Subject)[name], "stretch")


def _own_model() -> None:
    key = f"config{scenario.WIDGET}"
    if key not in st.session_state:
        st.session_state[key] = scenario.current().config
    st.text_area(
        "config.json, pasted",
        key=key,
        height=120,
        placeholder='{"model_type": "llama", "hidden_size": 4096, ...}',
        on_change=_pasted,
        args=(key,),
    )
    st.file_uploader(
        "or uploaded",
        "json",
        key="config file",
        help="The model's config.json, at most 2 MB.",
        on_change=_uploaded,
    )


def _pasted(key: str) -> None:
    link.touched()
    scenario.keep_config(str(st.session_state[key] or ""))


def _uploaded() -> None:
    upload = st.session_state["config file"]
    if upload:
        link.touched()
        scenario.keep_config(upload.getvalue().decode("utf-8", "replace"))
        scenario.forget_widgets()


def _gpu_facts(name: str) -> None:
    gpu = gpus()[name]
    estimate = "a lower estimate" if gpu.memory_is_estimate else "driver's figure"
    memory = "unknown memory" if gpu.memory_bytes is None else f"{show_bytes(gpu.memory_bytes)} ({estimate})"
    st.caption(
        f"{memory} · {_rate(gpu.peak_flops('bf16'), 1e12, 'TFLOP/s bf16')} · {_rate(gpu.memory_bandwidth, 1e9, 'GB/s')}"
    )


def _rate(value: float | None, unit: float, name: str) -> str:
    return f"unknown {name}" if value is None else f"{value / unit:,.0f} {name}"
