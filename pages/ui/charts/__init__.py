"""Charts in Vega-Lite, which Streamlit redraws in place. Each has a description for those who do not see it."""

from pages.ui.charts.bars import Limit, stacked
from pages.ui.charts.curves import Band, Curve, areas, as_csv, curves
from pages.ui.charts.drawing import title
from pages.ui.charts.lanes import Bar, lanes
from pages.ui.charts.matrix import KINDS, Square, matrix
from pages.ui.charts.timeline import timeline

__all__ = [
    "KINDS",
    "Band",
    "Bar",
    "Curve",
    "Limit",
    "Square",
    "areas",
    "as_csv",
    "curves",
    "lanes",
    "matrix",
    "stacked",
    "timeline",
    "title",
]
