"""The second witness: the real training step, run by PyTorch with fake tensors, with every storage counted once.

`trace_step(config, TraceOptions(...))` takes a Hugging Face config.json as a dict and returns a TraceResult.
"""

from measure.trace.options import TraceOptions
from measure.trace.result import SavedRow, TraceResult
from measure.trace.run import trace_step

__all__ = ["SavedRow", "TraceOptions", "TraceResult", "trace_step"]
