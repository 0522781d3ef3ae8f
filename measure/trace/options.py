"""What a trace is asked to do: the step's shape, precision, optimizer and what is kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The step to run. Sizes are counts; `rounding` is the allocator's granule in bytes (1 counts exact bytes).

    `recipe` is pure-bf16, amp, fp32 or fsdp-bf16 (fp32 shards, gathered in bf16); `attention` sdpa, eager or auto (sdpa where the
    model's class has it); `recompute` none or full; `method` full, lora, dora or qlora; `dropout` config or off; optimizers are those of
    `measure.trace.optimizers`.
    `accumulation` is the number of micro-batches between two optimizer steps. `layers` is the number of decoder layers that are
    really run before the rest is extended from them: None runs the fewest that show every kind of layer, 0 runs all of them.
    `lora_targets` is a tuple of module names or ("all-linear",); empty leaves peft's own choice for the architecture.
    `dp` ranks share the work, of which this is rank 0: `zero` 3 shards everything by FSDP2, 1 the optimizer by ZeroRedundancyOptimizer.
    """

    seq: int = 4096
    micro_batch: int = 1
    accumulation: int = 1
    recipe: str = "pure-bf16"
    optimizer: str = "adamw"
    optimizer_kernel: str = "foreach"
    recompute: str = "none"
    attention: str = "auto"
    dropout: str = "config"
    method: str = "full"
    lora_rank: int = 8
    lora_targets: tuple[str, ...] = ()
    dp: int = 1
    zero: int = 0
    reshard_after_forward: bool = True
    rounding: int = 512
    layers: int | None = None
