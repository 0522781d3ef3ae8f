"""The sidebar that all pages share: model and GPU, the second scenario, measured figures, units."""

from __future__ import annotations

import streamlit as st

from calc.catalogue import catalogue
from calc.hardware import gpus
from calc.units import show_bytes
from pages.ui import hub
from pages.ui.field_display import CUSTOM, HUB
from pages.ui.fields import ask
from pages.ui.scenario import SECOND, Subject, View

_FIGURES = ("gpu_memory_gib", "gpu_tflops", "gpu_GBps")


def draw() -> None:
    """Draw the sidebar; `scenario` reads what it holds."""
    with st.sidebar:
        _subject("")
        if ask("compare", View.model_fields["compare"], width="stretch"):
            st.markdown("**Second scenario**")
            _subject(SECOND)
        for name in ("calibrated", "units"):
            ask(name, View.model_fields[name], width="stretch")


def _subject(prefix: str) -> None:
    fields = Subject.model_fields
    model = ask("model", fields["model"], prefix, width="stretch")
    if model == HUB:
        _hub_model(prefix)
    elif model == CUSTOM:
        _own_model(prefix)
    elif model in catalogue():
        _model_source(model)
    gpu = ask("gpu", fields["gpu"], prefix, width="stretch")
    if gpu in gpus():
        _gpu_facts(gpu)
    with st.expander("The GPU's figures", expanded=gpu == CUSTOM):
        for name in _FIGURES:
            ask(name, fields[name], prefix, width="stretch")


def _hub_model(prefix: str) -> None:
    ask("hub_id", Subject.model_fields["hub_id"], prefix, width="stretch")
    if hub.is_offline():
        st.caption("HF_HUB_OFFLINE is set: only what is in Hugging Face's cache is read.")


def _own_model(prefix: str) -> None:
    st.text_area(
        "config.json, pasted",
        key=f"{prefix}config_text",
        height=120,
        placeholder='{"architectures": ["LlamaForCausalLM"], ...}',
    )
    st.file_uploader(
        "or uploaded", "json", key=f"{prefix}config_file", help="The model's config.json, at most 2 MB. It is not kept."
    )


def _model_source(name: str) -> None:
    entry = catalogue()[name]
    st.caption(f"[{entry.hub_id}](https://huggingface.co/{entry.hub_id})")


def _gpu_facts(name: str) -> None:
    gpu = gpus()[name]
    estimate = "a lower estimate" if gpu.memory_is_estimate else "driver's figure"
    memory = "unknown memory" if gpu.memory_bytes is None else f"{show_bytes(gpu.memory_bytes)} ({estimate})"
    st.caption(
        f"{memory} · {_rate(gpu.peak_flops('bf16'), 1e12, 'TFLOP/s bf16')} · {_rate(gpu.memory_bandwidth, 1e9, 'GB/s')}"
    )


def _rate(value: float | None, unit: float, name: str) -> str:
    return f"unknown {name}" if value is None else f"{value / unit:,.0f} {name}"
