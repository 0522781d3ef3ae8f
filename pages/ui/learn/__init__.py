"""The topics of the page that teaches, and the one that is open."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Final, Literal

import streamlit as st
from pydantic import BaseModel, ConfigDict, Field

from calc.commands import COMMANDS
from calc.learn.all_reduce import AllReducePlan
from calc.learn.attention_memory import AttentionMemoryPlan, OnlineSoftmaxPlan
from calc.learn.batching import BatchingPlan
from calc.learn.cache_kinds import CacheKindsPlan
from calc.learn.checkpointing import CheckpointingPlan
from calc.learn.compute_budget import ComputeBudgetPlan
from calc.learn.half_precision import HalfPrecisionPlan
from calc.learn.layer_roofline import LayerRooflinePlan
from calc.learn.low_rank import LowRankPlan
from calc.learn.paged_blocks import PagedBlocksPlan
from calc.learn.parallel_layer import ParallelLayerPlan
from calc.learn.parts_by_cost import PartsByCostPlan
from calc.learn.speculation import SpeculationPlan
from calc.learn.zero_stages import ZeroStagesPlan
from calc.model.bare import BareModelPlan
from pages.ui import link, scenario, widgets
from pages.ui.fields import fields_of
from pages.ui.learn.number_formats import FormatChoice
from pages.ui.numbers import Numbers
from pages.ui.page import complaints

Name = Literal[
    "bare-model",
    "parts-by-cost",
    "number-formats",
    "half-precision",
    "zero-stages",
    "checkpointing",
    "low-rank",
    "attention-memory",
    "all-reduce",
    "parallel-layer",
    "pipeline",
    "cache-kinds",
    "paged-blocks",
    "batching",
    "speculation",
    "layer-roofline",
    "compute-budget",
]


class Topic(BaseModel):
    """Which topic is open."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    topic: Name = Field("bare-model", description="what to look at")


PLANS: Final = (
    Topic,
    BareModelPlan,
    PartsByCostPlan,
    FormatChoice,
    HalfPrecisionPlan,
    ZeroStagesPlan,
    CheckpointingPlan,
    LowRankPlan,
    AttentionMemoryPlan,
    OnlineSoftmaxPlan,
    AllReducePlan,
    ParallelLayerPlan,
    COMMANDS["pipeline"].plan,
    CacheKindsPlan,
    PagedBlocksPlan,
    BatchingPlan,
    SpeculationPlan,
    LayerRooflinePlan,
    ComputeBudgetPlan,
)


def _module(topic: str) -> Callable[[Numbers], None]:
    """What draws a topic; its module has the topic's name and is imported when it is opened."""
    show: Callable[[Numbers], None] = import_module(f"pages.ui.learn.{topic.replace('-', '_')}").show
    return show


@st.fragment
def show() -> None:
    """Draw the open topic alone."""
    widgets.redraw_if_put()
    widgets.ask(fields_of(Topic)["topic"])
    with complaints():
        _module(scenario.current().of(Topic).topic)(Numbers(scenario.view().units))
    link.write()
