"""What a user says about a training step's time: the flags of `train`, the machine around the GPU, and the run's length and price."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from calc.communication.plan import CONTEXT_EXCHANGE, ContextExchange
from calc.errors import InputError
from calc.quantities import left_out, whole_number
from calc.training import TrainingPlan

Format = Literal["bf16", "fp16", "fp32", "fp8", "fp8-block", "mxfp8", "nvfp4"]
AttentionKernel = Literal["flash-1", "flash-triton", "memory-efficient", "flash-2", "flash-3", "cudnn", "unfused"]
CudaGraphs = Literal["none", "attention", "full"]


class TimePlan(TrainingPlan):
    """One training step as `train` describes it, on a machine, by a program that fuses more or less."""

    matmul: Format | None = Field(
        None,
        description="number format of the layers' matrix products; left out: the recipe's (fp8: scales per tensor)",
    )
    attention_kernel: AttentionKernel | None = Field(
        None,
        description="attention's program; left out: cudnn with implementation fused, unfused with attention eager, else flash-2 "
        "(memory-efficient where values are not as wide as keys)",
    )
    compiled: bool = Field(
        False,
        description="torch.compile fuses the memory-bound operators of each layer (of torchtitan and torchtune, compile says so)",
    )
    cuda_graphs: CudaGraphs = Field(
        "none", description="what CUDA graphs replay without the host: nothing, all but the experts, or the whole step"
    )
    tp_overlap: bool | None = Field(
        None,
        description="tensor parallelism's collectives run at the same time as the products; left out: only with implementation fused",
    )
    dp_overlap: bool = Field(
        True,
        description="zero 0 to 2: gradients are reduced under the last backward, weights gathered under the next forward (Megatron: "
        "overlap_grad_reduce and overlap_param_gather)",
    )
    reduce_format: Literal["bf16", "fp32"] | None = Field(
        None,
        description="format in which gradients are reduced; left out: fp32 where the recipe keeps them so, else bf16",
    )
    context_exchange: ContextExchange = CONTEXT_EXCHANGE
    mtp_layers: int = Field(
        0,
        ge=0,
        le=16,
        description="layers that predict further tokens (DeepSeek-V3: 1), each with a pass of the head; train counts no bytes of them",
    )
    ep_dispatch: Literal["all-to-all", "fused"] = Field(
        "all-to-all",
        description="experts' exchange: NCCL's with permutations of their own, or one kernel (DeepEP, HybridEP)",
    )
    ep_overlap: bool = Field(
        False, description="experts' exchange runs under the work of another micro-batch (Megatron's 1F1B overlap)"
    )
    expert_kernels: Literal["separate", "grouped", "fused"] | None = Field(
        None,
        description="experts' products: one each (Transformer Engine over cuBLAS), one kernel for all, or one with activation, casts and "
        "permutation in it; left out: separate with implementation fused, else grouped",
    )
    expert_skew: float = Field(
        1.0, ge=1, le=64, description="tokens of the busiest rank's experts over the mean; 1: balanced"
    )
    picture_patches: int = Field(
        0,
        ge=0,
        le=2**20,
        description="patches of one picture, which the vision tower reads (336 x 336 pixels at 14 a side: 576); 0: the step reads "
        "text alone",
    )
    pictures: int = Field(1, ge=1, le=4096, description="pictures of each sequence")
    times: Literal["measured", "calibrated", "roofline"] = Field(
        "measured", description="kernel times: public tables, your own GPU's, or the data sheet's peaks"
    )
    gpus_per_node: int | None = Field(
        None, ge=1, le=1024, description="GPUs of one NVLink or PCIe domain; left out: the usual number of that GPU"
    )
    intra_GBps: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="link of one GPU inside the domain, one way, in GB/s; left out: the data sheet's",
    )
    inter_GBps: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="network of one GPU between domains, one way, in GB/s; left out: the usual NIC's",
    )
    tokens: Annotated[int | None, BeforeValidator(left_out), BeforeValidator(whole_number)] = Field(
        None, ge=1, le=10**18, description="tokens of the whole run, such as 2e12 or 1T; left out: one step"
    )
    price_per_gpu_hour: float | None = Field(
        None,
        ge=0,
        le=1e6,
        description="price of a GPU-hour; left out: a dated public price of that GPU, where there is one",
    )
    power_utilization: float = Field(1.0, gt=0, le=1, description="power drawn, a share of the board power")
    pue: float = Field(1.1, ge=1, le=5, description="power usage effectiveness of the data centre (LLaMA paper: 1.1)")
    grid_intensity: float = Field(
        0.385, ge=0, le=2, description="kg of CO2 equivalent for a kWh (LLaMA paper: the US mean of 0.385)"
    )
    gpu_failure_hours: float = Field(
        50_000.0,
        gt=0,
        le=1e9,
        description="hours between failures of one GPU (Llama 3, arXiv 2407.21783: 419 in 54 days on 16,384)",
    )
    checkpoint_GBps: float = Field(
        2.0, gt=0, le=1e5, description="GB/s at which each GPU writes its share of a checkpoint"
    )

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.compiled and self.implementation in ("torchtitan", "torchtune"):
            raise InputError.of("compiled", True, f"implementation {self.implementation!r} says it by compile model")
        if self.float8 != "none" and self.matmul not in (None, "fp8"):
            raise InputError.of("matmul", self.matmul, f"float8 {self.float8!r} means fp8")
        return self

    @cached_property
    def compute_format(self) -> Format:
        """The number format of the layers' matrix products."""
        if self.matmul is not None or self.float8 != "none":
            return self.matmul or "fp8"
        by_recipe: dict[str, Format] = {"fp32": "fp32", "fp8": "fp8", "mixed-16": "fp16", "megatron-fp16": "fp16"}
        return by_recipe.get(self.recipe, "bf16")

    @cached_property
    def attention_program(self) -> AttentionKernel:
        """Whose attention kernel runs."""
        if self.attention_kernel is not None:
            return self.attention_kernel
        if self.attention == "eager":
            return "unfused"
        return "cudnn" if self.implementation == "fused" else "flash-2"

    @property
    def expert_program(self) -> Literal["separate", "grouped", "fused"]:
        """How experts' products run."""
        if self.expert_kernels is not None:
            return self.expert_kernels
        return "separate" if self.implementation == "fused" else "grouped"

    @property
    def overlaps_tp(self) -> bool:
        """Whether tensor parallelism's collectives run at the same time as the products that they serve."""
        return self.implementation == "fused" if self.tp_overlap is None else self.tp_overlap

    @cached_property
    def tokens_of_rank(self) -> int:
        """Tokens of one micro-batch that a rank holds (each tensor-parallel rank sees all of them in its products)."""
        return self.sequences * self.seq // self.cp

    @property
    def tokens_of_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.batch * self.seq * (2 if self.objective == "dpo" else 1)

    @property
    def idle(self) -> dict[str, str]:
        """Fields that change nothing next to the others, each with the reason. Memory alone is `train`'s question."""
        reasons = dict(super().idle)
        if not self.tp > 1:
            reasons["tp_overlap"] = "tp is 1"
        if not self.picture_patches:
            reasons["pictures"] = "picture_patches is 0"
        if self.cp == 1:
            reasons["context_exchange"] = "cp is 1"
        if self.dp * self.cp == 1 or self.zero == 3:
            reasons["dp_overlap"] = (
                "no data-parallel rank shares in a step" if self.zero < 3 else "zero 3 gathers layer by layer"
            )
        if self.expert_ranks == 1:
            reasons |= dict.fromkeys(("ep_dispatch", "ep_overlap"), "ep is 1")
        for name in ("context_mib", "nccl_mib", "workspace_mib", "fragmentation_percent"):
            reasons[name] = "it is memory outside the step's tensors, which takes no time"
        return reasons
