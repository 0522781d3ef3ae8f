"""Pipeline schedules, simulated operation by operation: utilisation, bubbles, micro-batches in flight, the timeline."""

from calc.pipeline.answer import Event, PipelineAnswer, simulate
from calc.pipeline.closed_forms import ClosedForm
from calc.pipeline.plan import PipelinePlan
from calc.pipeline.schedules import SCHEDULES, Schedule, check_layout, in_flight, weight_versions

__all__ = [
    "SCHEDULES",
    "ClosedForm",
    "Event",
    "PipelineAnswer",
    "PipelinePlan",
    "Schedule",
    "check_layout",
    "in_flight",
    "simulate",
    "weight_versions",
]
