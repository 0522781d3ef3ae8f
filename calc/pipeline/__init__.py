"""Pipeline schedules, simulated operation by operation: utilisation, bubbles, micro-batches in flight, the timeline."""

from calc.pipeline.plan import PipelinePlan
from calc.pipeline.schedules import SCHEDULES, Schedule, check_layout, in_flight, weight_versions

__all__ = ["SCHEDULES", "PipelinePlan", "Schedule", "check_layout", "in_flight", "weight_versions"]
