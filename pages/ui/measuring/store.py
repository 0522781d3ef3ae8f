"""Results that were measured or imported before, read once for as long as their file does not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streamlit as st

from calc.hardware import Gpu
from calc.measurements.calibration import Calibration, calibration
from calc.measurements.records import Records


def rows(records: Records) -> list[dict[str, Any]]:
    """Every saved row, as `Records.rows` has it. InputError when the store cannot be read."""
    return _rows(records.path, _changed(records.path))


def _changed(path: Path) -> int:
    """When the file was last written; 0 while there is none."""
    return path.stat().st_mtime_ns if path.exists() else 0


@st.cache_data(max_entries=2, show_spinner=False)
def _rows(path: Path, changed: int) -> list[dict[str, Any]]:
    return Records(path).rows()


def calibration_of(gpu: Gpu) -> Calibration:
    """What was measured on a GPU. InputError when the store cannot be read."""
    path = Records().path
    return _calibration(path, _changed(path), gpu.name)


@st.cache_data(max_entries=8, show_spinner=False)
def _calibration(path: Path, changed: int, gpu: str) -> Calibration:
    return calibration(Records(path).rows(), gpu)
