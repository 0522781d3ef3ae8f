"""What a user says about the machine that a training step communicates on."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from calc.training import TrainingPlan

ContextExchange = Literal["ring", "all-gather", "all-to-all"]
CONTEXT_EXCHANGE: Any = Field(
    "ring",
    description="how context-parallel ranks share keys and values: a ring, all-gather (Llama 3), or Ulysses' all-to-all",
)

# fields of a training plan that move nothing between GPUs
_SILENT = ("optimizer_kernel", "dropout", "attention", "loss", "context_mib", "nccl_mib", "workspace_mib")


class CommunicationPlan(TrainingPlan):
    """A training step on nodes of `gpus_per_node` GPUs: ranks fill a node before the next, tensor parallelism innermost, then
    context, data and pipeline parallelism; expert parallelism lies inside data and context parallelism."""

    gpus_per_node: int | None = Field(
        None, ge=1, le=1024, description="GPUs of a node, or of a rack's NVLink domain; left out: 8, or 72 of an NVL72"
    )
    intra_GBps: float | None = Field(
        None, gt=0, le=1e6, description="GB/s between GPUs of a node, one way; left out: the GPU's link, or PCIe"
    )
    inter_GBps: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="GB/s of one GPU's network card, one way; left out: that of the vendor's systems",
    )
    context_exchange: ContextExchange = CONTEXT_EXCHANGE
    gradient_exchange: Literal["all-reduce", "parameter-server"] = Field(
        "all-reduce",
        description="how data-parallel ranks agree on gradients with zero 0: an all-reduce, or one rank that adds all up and sends "
        "the weights back",
    )
    times: Literal["measured", "calibrated", "roofline"] = Field(
        "measured",
        description="times within a node: public tables, the user's measurements, or links at full bandwidth",
    )

    @property
    def idle(self) -> dict[str, str]:
        """Fields that change nothing next to the others, each with the reason."""
        reasons = super().idle | dict.fromkeys(_SILENT, "it moves nothing between GPUs")
        if self.cp == 1:
            reasons["context_exchange"] = "cp is 1"
        if self.zero or self.dp * self.cp == 1:
            reasons["gradient_exchange"] = "zero is 1 to 3" if self.zero else "one data-parallel rank has all gradients"
        return reasons
