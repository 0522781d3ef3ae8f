"""The second witness: the real training step, run by PyTorch with fake tensors, with every storage counted once.

`trace_step(config, TraceOptions(...))` takes a Hugging Face config.json as a dict and returns a `measure.trace.result.TraceResult`.
Importing this package imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from measure.trace.options import TraceOptions

if TYPE_CHECKING:
    from measure.trace.result import TraceResult

__all__ = ["TraceOptions", "trace_step"]


def trace_step(
    config: Mapping[str, Any], options: TraceOptions, progress: Callable[[str], None] = lambda text: None
) -> TraceResult:
    """Run two training steps of the config's model with fake tensors and report the second, in bytes of one device.

    Layers alike are run a few times and laid together to the whole; a model whose layers cannot be is run whole.
    InputError when transformers or torch cannot build or run what is asked. Not reentrant: it overrides operators of torch.
    """
    from measure.trace.run import traced

    return traced(config, options, progress)
