"""A stream of requests through replicas, event by event: tail latencies, waste of the cache, and fleets."""

from calc.serving.simulation.answer import SimulationAnswer, simulate_serving
from calc.serving.simulation.plan import SimulationPlan

__all__ = ["SimulationAnswer", "SimulationPlan", "simulate_serving"]
