"""Charts of measured rows in Vega-Lite: predicted against measured, and the roofline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import streamlit as st

from calc.measurements.roofline import Roof, Roofline
from calc.units import show_value
from pages.ui.charts import title

_HEIGHT = 340
_LEGEND_ROW = 14  # pixels
_GREY = "#8a8f98"
_LEGEND = {"orient": "bottom", "title": None, "labelLimit": 260, "columns": {"expr": "max(1, floor(width / 260))"}}
_LOG = {"type": "log", "nice": False}


def against(rows: Sequence[Mapping[str, Any]], key: str) -> None:
    """Measured over predicted, one point a row, with the line where they are equal; a chart for each unit."""
    known = [row for row in rows if row["predicted"] and row["measured"] and row["predicted"] > 0 < row["measured"]]
    units = list(dict.fromkeys(row["unit"] for row in known))
    if units:
        title("Measured against predicted")
    for unit in units:
        here = [row for row in known if row["unit"] == unit]
        axis = f"predicted ({unit})" if unit else "predicted"
        st.vega_lite_chart([_point(row) for row in here], _against(here, axis), key=f"{key} {unit}")


def _point(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "predicted": row["predicted"],
        "measured": row["measured"],
        "quantity": row["quantity"].split("/")[0],
        "shown": f"{row['case']}, {row['quantity']}: predicted {_read(row, 'predicted')}, measured {_read(row, 'measured')}",
    }


def _read(row: Mapping[str, Any], side: str) -> str:
    unit = row["unit"]
    return show_value(row[side], unit) if unit in ("bytes", "seconds") else f"{row[side]:,.4g} {unit}".rstrip()


def _against(rows: Sequence[Mapping[str, Any]], label: str) -> dict[str, Any]:
    values = [row[side] for row in rows for side in ("predicted", "measured")]
    ends = [min(values) / 1.5, max(values) * 1.5]
    scale = _LOG | {"domain": ends}
    axis = {"format": "~s", "tickCount": 5}
    return {
        "height": _HEIGHT,
        "layer": [
            {
                "data": {"values": [{"predicted": end, "measured": end} for end in ends]},
                "mark": {"type": "line", "color": _GREY, "strokeDash": [5, 4]},
                "encoding": {side: {"field": name, "type": "quantitative"} for side, name in _SIDES},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 60, "opacity": 0.75},
                "encoding": {
                    **{
                        side: {
                            "field": name,
                            "type": "quantitative",
                            "scale": scale,
                            "axis": axis | {"title": label if name == "predicted" else "measured"},
                        }
                        for side, name in _SIDES
                    },
                    "color": {"field": "quantity", "type": "nominal", "legend": _LEGEND},
                    "tooltip": {"field": "shown"},
                },
            },
        ],
    }


_SIDES = (("x", "predicted"), ("y", "measured"))


def roofline(found: Roofline, key: str) -> None:
    """Each kernel by FLOPs a byte and FLOP/s, under the machine's roofs; both axes in powers."""
    intensities = [point.intensity for point in found.points] + [roof.ridge for roof in found.roofs]
    ends = [min(intensities) / 4, max(intensities) * 4]
    points = [
        {
            "intensity": point.intensity,
            "rate": point.rate,
            "kernel": point.kernel,
            "shown": f"{point.kernel}, {point.case}: {point.rate / 1e12:,.4g} TFLOP/s at {point.intensity:,.4g} FLOP/B",
        }
        for point in found.points
    ]
    kernels = len({point["kernel"] for point in points})
    spec = {
        "height": _HEIGHT + _LEGEND_ROW * kernels,  # its legend takes of it, most where the screen is narrow
        "layer": [
            {"data": {"values": list(_lines(found.roofs, ends))}, "mark": {"type": "line"}, "encoding": _ROOFS},
            {"mark": {"type": "point", "filled": True, "size": 80}, "encoding": _KERNELS},
        ],
        "resolve": {"scale": {"color": "independent"}},
        "config": {
            "legend": {"layout": {"bottom": {"direction": "vertical", "anchor": "start"}}}
        },  # one below the other
    }
    st.vega_lite_chart(points, spec, key=key)


def _lines(roofs: Iterable[Roof], ends: Sequence[float]) -> Iterable[dict[str, Any]]:
    """Each roof as three points: its slope's beginning, the ridge, the flat end."""
    for roof in roofs:
        for intensity in (ends[0], roof.ridge, ends[1]):
            yield {"intensity": intensity, "rate": roof.rate(intensity), "roof": roof.name}


_PLACE = {
    "x": {
        "field": "intensity",
        "type": "quantitative",
        "scale": _LOG,
        "axis": {"title": "FLOPs a byte", "format": "~s"},
    },
    "y": {"field": "rate", "type": "quantitative", "scale": _LOG, "axis": {"title": "FLOP/s", "format": "~s"}},
}
_ROOFS = _PLACE | {
    "strokeDash": {"field": "roof", "type": "nominal", "legend": _LEGEND},
    "color": {"value": _GREY},
}
_KERNELS = _PLACE | {
    "color": {"field": "kernel", "type": "nominal", "legend": _LEGEND},
    "tooltip": {"field": "shown"},
}
