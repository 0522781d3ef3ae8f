"""The fields of a training plan, which are the flags of `train` and `trace`, and what follows from them."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from calc.training.states.base_formats import BaseFormat
from calc.training.states.tensors import Adapter, Lora

Recipe = Literal[
    "pure-bf16", "amp", "bf16-autocast", "fp32", "mixed-16", "megatron-bf16", "megatron-fp16", "megatron-precision-aware",
    "fsdp-bf16", "fp8",
]  # fmt: skip
Optimizer = Literal["adamw", "sgd", "momentum", "adafactor", "lion", "muon", "adamw-8bit", "adamw-4bit", "paged-adamw"]
Loss = Literal["full", "chunked", "fused", "chunked-output"]
RECOMPUTABLE = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
Schedule = Literal[
    "naive", "gpipe", "1f1b", "interleaved", "looped-bfs", "interleaved-zb", "zb-h1", "zb-h2", "zb-v", "dualpipe-v",
    "pipedream",
]  # fmt: skip


def _names(value: object) -> object:
    """Names with commas between them, as a flag or a URL gives them."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]


class PlanFields(BaseModel):
    """What a plan holds, each field within its own bounds. `TrainingPlan` adds the rules between them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seq: int = Field(4096, ge=1, le=2**24, description="sequence length in tokens")
    micro_batch: int = Field(1, ge=1, le=2**20, description="sequences in one micro-batch")
    global_batch: int | None = Field(
        None, ge=1, le=2**30, description="sequences in one optimizer step; left out: micro-batch · dp"
    )
    dp: int = Field(1, ge=1, le=2**20, description="data-parallel ranks")
    tp: int = Field(1, ge=1, le=1024, description="tensor-parallel ranks")
    pp: int = Field(1, ge=1, le=1024, description="pipeline stages")
    cp: int = Field(1, ge=1, le=4096, description="context-parallel ranks: each holds seq / cp tokens")
    ep: int = Field(1, ge=1, le=4096, description="expert-parallel ranks, inside dp · cp")
    ep_over_tp: bool = Field(
        False,
        description="experts stay whole, and ep · tp ranks share them (Megatron's and torchtitan's expert tensor parallelism of 1); else "
        "tp divides each",
    )
    dp_replicate: int = Field(1, ge=1, le=2**20, description="data-parallel ranks that hold equal shards (HSDP)")
    zero: int = Field(0, ge=0, le=3, description="ZeRO: 1 shards the optimizer, 2 gradients too, 3 (FSDP) weights too")
    reshard_after_forward: bool = Field(True, description="free all-gathered weights after the forward (ZeRO-3)")
    root_group: bool = Field(
        False,
        description="torchtitan, torchtune: embedding, final norm and head are gathered as one group, as torchtitan did before July 2025 "
        "(pull request 1094)",
    )
    sequence_parallel: bool | None = Field(
        None, description="divide the sequence between TP blocks; left out: on with tp > 1"
    )
    recipe: Recipe = Field("pure-bf16", description="number formats of weights, gradients and states")
    optimizer: Optimizer = Field("adamw", description="the optimizer")
    optimizer_kernel: Literal["foreach", "fused", "loop"] = Field(
        "foreach", description="PyTorch's implementation of the optimizer step"
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="activations that the backward computes again; selective: what is chosen by operator (torchtitan), or "
        "attention's scores",
    )
    recompute_modules: Names = Field(
        (),
        description="fused: modules that the backward computes again (Megatron's names, with commas): "
        + ", ".join(RECOMPUTABLE),
    )
    recompute_every: int = Field(
        1,
        ge=1,
        le=1024,
        description="torchtitan, recompute full: one layer of so many is recomputed (selective_ac_option)",
    )
    experts_of: Literal["2025-06", "2025-09", "2025-11"] = Field(
        "2025-11",
        description="torchtitan's program of experts, by the month from which it holds: before November 2025 each output is weighted and "
        "added to the shared expert's (pull request 1974), before September selective recomputation keeps no exchanged tokens (1672)",
    )
    compile: Names = Field(
        (), description="torchtitan, torchtune: what torch.compile compiles, with commas: model (each layer), loss"
    )
    simple_fsdp: bool = Field(
        False,
        description="torchtitan, compile model: SimpleFSDP, whose gathers are operators of the compiled graph, in one stream",
    )
    float8: Literal["none", "tensorwise", "rowwise"] = Field(
        "none",
        description="torchtitan: layers' products in float8 by torchao's dynamic scaling, which needs compile model",
    )
    float8_all_gather: bool = Field(
        False, description="torchtitan, float8 tensorwise: FSDP gathers the layers' weights in float8"
    )
    attention: Literal["sdpa", "flash", "eager"] = Field("sdpa", description="the attention program")
    dropout: Literal["config", "off"] = Field("config", description="the config's dropout, or none")
    implementation: Literal["hf", "liger", "deepspeed", "litgpt", "torchtune", "torchtitan", "fused", "paper"] = Field(
        "hf",
        description="whose program: transformers, alone, with Liger-Kernel's operators or in DeepSpeed's engine, litgpt, torchtune, "
        "torchtitan, Megatron with Transformer Engine, or arXiv 2205.05198",
    )
    loss: Loss | None = Field(
        None,
        description="cross-entropy: full logits, chunked with the head, or fused with it (Liger-Kernel's; of implementation fused: "
        "Transformer Engine's, in place on 16-bit logits), or of full logits chunk by chunk (chunked-output: torchtitan, torchtune); "
        "left out: full, fused with liger, chunked-output with torchtune, chunked for dpo and grpo",
    )
    loss_format: Literal["fp32", "upcast", "model"] = Field(
        "fp32",
        description="the logits of the loss: cast to fp32 inside it; cast by the model and shifted as a copy (transformers up to "
        "4.44); or in the model's own format (remote code of 2023)",
    )
    keep_logits: bool = Field(False, description="the caller holds the model's logits to the end of the step")
    schedule: Schedule = Field("1f1b", description="pipeline schedule")
    virtual_stages: int = Field(1, ge=1, le=256, description="chunks of the model on a pipeline stage")
    first_stage_layers: int | None = Field(
        None,
        ge=0,
        le=2**20,
        description="layers of the first pipeline stage (Megatron's num_layers_in_first_pipeline_stage); left out: even",
    )
    last_stage_layers: int | None = Field(
        None, ge=0, le=2**20, description="layers of the last pipeline stage; left out: even"
    )
    method: Literal["full", "lora", "dora", "qlora"] = Field("full", description="full training or adapters")
    adapter: Adapter = Field(
        "lora",
        description="litgpt: what trains under methods lora and qlora: LoRA, LLaMA-Adapter's prompts (litgpt finetune_adapter), or its "
        "second version with biases, scales and norms (finetune_adapter_v2)",
    )
    lora_rank: int = Field(8, ge=1, le=65536, description="rank r of the adapters")
    lora_targets: Names = Field(
        (),
        description="modules with adapters, with commas, or all-linear; left out: q_proj,v_proj, all-linear for qlora",
    )
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="dropout of the adapters' inputs")
    adapter_format: Literal["fp32", "bf16"] = Field(
        "fp32", description="numbers of the adapters: fp32 as peft makes them since 0.12, or the model's 16 bits"
    )
    modules_to_save: Names = Field(
        (), description="modules that train whole next to the adapters, as copies: embed_tokens, lm_head (peft)"
    )
    quantization: BaseFormat = Field(
        "nf4", description="format of the frozen weights under qlora; nf4-single and fp4 without double quantisation"
    )
    bitsandbytes: Literal["0.42", "0.50"] = Field(
        "0.50", description="bitsandbytes' version: up to 0.42 its 4-bit product keeps its input"
    )
    objective: Literal["pretrain", "sft", "dpo", "ppo", "grpo"] = Field(
        "pretrain",
        description="what the step optimises: dpo and grpo as TRL's trainers do, a micro-batch being pairs or completions",
    )
    prompt_tokens: int = Field(
        1,
        ge=1,
        le=2**24,
        description="tokens of each sequence that are the prompt: not scored, and read at once (dpo, grpo)",
    )
    reference: bool | None = Field(
        None, description="hold a frozen reference model; left out: for dpo without adapters (grpo: TRL's beta is 0)"
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        "none", description="what lives in host memory: optimizer (with gradients), or parameters too"
    )
    offload_activations: bool = Field(
        False, description="recomputed layers keep their inputs in host memory until backward (Unsloth, torchtune)"
    )
    optimizer_in_backward: bool = Field(
        False, description="each weight is updated as soon as its gradient is there, which is freed then (torchtune)"
    )
    nvme: bool = Field(False, description="keep what is offloaded on NVMe")
    nvme_GBps: float | None = Field(
        None, gt=0, le=1e6, description="NVMe bandwidth of one GPU in GB/s; left out: 1.6 (ZeRO-Infinity)"
    )
    reduce_bucket_size: int | None = Field(
        None, ge=0, le=2**40, description="DeepSpeed: elements of a bucket of gradients; left out: 500,000,000"
    )
    contiguous_gradients: bool | None = Field(
        None, description="DeepSpeed: gradients are copied into buckets; left out: on"
    )
    overlap_comm: bool | None = Field(
        None, description="DeepSpeed: reduce gradients while backward runs, from two buckets; left out: on for zero 3"
    )
    sub_group_size: int | None = Field(
        None, ge=1, le=2**40, description="DeepSpeed, zero 3: elements updated at once; left out: 1,000,000,000"
    )
    stage3_prefetch_bucket_size: int | None = Field(
        None, ge=0, le=2**40, description="DeepSpeed: elements all-gathered ahead; left out: 50,000,000"
    )
    stage3_max_live_parameters: int | None = Field(
        None, ge=0, le=2**40, description="DeepSpeed: elements whole at a time; left out: 1,000,000,000"
    )
    stage3_max_reuse_distance: int | None = Field(
        None, ge=0, le=2**40, description="DeepSpeed: weights used again within so many stay; left out: 1,000,000,000"
    )
    stage3_param_persistence_threshold: int | None = Field(
        None, ge=0, le=2**40, description="DeepSpeed: weights of fewer elements stay whole; left out: 100,000"
    )
    expandable_segments: bool | None = Field(
        None,
        description="PyTorch's allocator grows its segments (PYTORCH_CUDA_ALLOC_CONF); left out: on with torchtitan, whose run_train.sh "
        "sets it since December 2024",
    )
    context_mib: float | None = Field(
        None, ge=0, le=1_000_000, description="CUDA context in MiB; left out: the sourced default"
    )
    nccl_mib: float | None = Field(None, ge=0, le=1_000_000, description="NCCL buffers of one process group in MiB")
    workspace_mib: float | None = Field(None, ge=0, le=1_000_000, description="cuBLAS workspace in MiB")
    fragmentation_percent: float | None = Field(
        None, ge=0, le=1000, description="reserved beyond allocated, in percent of the peak"
    )

    @property
    def transformers(self) -> bool:
        """Whether the step is transformers' program, with Liger-Kernel's operators or its own."""
        return self.implementation in ("hf", "liger", "deepspeed", "litgpt", "torchtune")

    @property
    def shards_ends_apart(self) -> bool:
        """Whether FSDP2 shards embedding and head as groups of their own: torchtitan's, and torchtune's full recipes
        (custom_sharded_layers in their configs)."""
        full = self.implementation == "torchtune" and self.method == "full"
        return (self.implementation == "torchtitan" or full) and not self.root_group

    @property
    def replays(self) -> bool:
        """Whether the step's allocations are known in order, and are played through a model of the allocator."""
        program = self.transformers or self.implementation == "torchtitan"
        return program and self.pp == 1 and not self.scores and self.fragmentation_percent is None

    @property
    def expandable(self) -> bool:
        """Whether the allocator grows its segments."""
        given = self.expandable_segments
        return self.implementation == "torchtitan" if given is None else given

    @property
    def head_loss(self) -> Loss:
        """The cross-entropy's program: Liger-Kernel fuses it with the head, TRL runs both chunk by chunk, others keep the logits."""
        if self.loss is not None:
            return self.loss
        own: dict[str, Loss] = {"liger": "fused", "torchtune": "chunked-output"}
        return own.get(self.implementation, "chunked" if self.scores else "full")

    @property
    def scores(self) -> bool:
        """Whether the step asks for log-probabilities of completions, as preference and reinforcement learning do."""
        return self.objective in ("dpo", "grpo")

    @property
    def sequences(self) -> int:
        """Sequences that the policy sees at a time: chosen and rejected answers of each pair for dpo."""
        return self.micro_batch * (2 if self.objective == "dpo" else 1)

    @property
    def generated(self) -> int:
        """Sequences that grpo's rollout generates at once on a rank: those of a whole optimizer step."""
        return self.batch // self.dp

    @property
    def runs_reference(self) -> bool:
        """Whether a reference scores the sequences: a model of its own, or with adapters the base without them."""
        return self.scores and (self.objective == "dpo" if self.reference is None else self.reference)

    @property
    def holds_reference(self) -> bool:
        """Whether the reference is a model of its own."""
        return self.runs_reference and self.method == "full"

    @cached_property
    def batch(self) -> int:
        """The global batch in sequences."""
        return self.global_batch if self.global_batch is not None else self.micro_batch * self.dp

    @cached_property
    def microbatches(self) -> int:
        """Micro-batches that one rank runs in one step."""
        return self.batch // (self.micro_batch * self.dp)

    @cached_property
    def sharded_sequence(self) -> bool:
        """Whether the parts between the tensor-parallel blocks divide the sequence by tp."""
        return self.tp > 1 and self.sequence_parallel is not False

    @cached_property
    def shards(self) -> int:
        """Ranks over which ZeRO shards what is not an expert: n · c, within one replica."""
        return self.dp * self.cp // self.dp_replicate

    @property
    def expert_ranks(self) -> int:
        """Ranks that exchange tokens for their experts."""
        return self.ep * self.tp if self.ep_over_tp else self.ep

    @cached_property
    def expert_shards(self) -> int:
        """Ranks over which ZeRO shards the experts: n · c / e."""
        return self.shards // self.ep

    @cached_property
    def lora(self) -> Lora | None:
        """The adapters, where only they train."""
        if self.method == "full":
            return None
        quantised = self.method == "qlora"
        targets = self.lora_targets or (("all-linear",) if quantised and self.implementation != "litgpt" else ())
        return Lora(
            self.lora_rank,
            targets,
            magnitude=self.method == "dora",
            quantised=quantised,
            base=self.quantization,
            width=2
            if self.adapter_format == "bf16" or self.implementation in ("deepspeed", "litgpt", "torchtune")
            else 4,
            dropout=self.lora_dropout,
            saved=self.modules_to_save,
            litgpt=self.implementation == "litgpt",
            adapter=self.adapter,
            keeps_input=quantised and self.bitsandbytes == "0.42" and self.quantization != "gptq-int4",
        )

    @cached_property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def _kernelless(self) -> str:
        """Why the optimizer's kernel changes nothing; "" where it does."""
        if self.offload != "none":
            return f"offload is {self.offload}: the host updates"
        if self.optimizer in ("adamw-8bit", "paged-adamw"):
            return f"optimizer {self.optimizer} has bitsandbytes' kernel alone"
        if self.optimizer == "adamw-4bit":
            return "optimizer adamw-4bit is compiled by torchao"
        return f"the step of {self.optimizer} makes no copies" if self.optimizer in ("sgd", "momentum") else ""

    @property
    def idle(self) -> dict[str, str]:
        """Fields that change nothing with the others as they are, each with the reason."""
        reasons = {
            "lora_rank": "method is full"
            if not self.lora
            else ""
            if self.adapter == "lora"
            else f"adapter is {self.adapter}",
            "schedule": "" if self.pp > 1 else "pp is 1",
            "dp_replicate": "" if self.zero else "zero is 0: every rank holds all states",
            "reshard_after_forward": "" if self.zero == 3 else f"zero is {self.zero}: no weights are gathered",
            "optimizer_kernel": self._kernelless,
            "expandable_segments": "" if self.replays else "what the allocator reserves is a share of the peak here",
            "nvme_GBps": "" if self.nvme else "nothing lies on NVMe",
            "ep_over_tp": "" if self.tp > 1 else "tp is 1",
        }
        return {name: reason for name, reason in reasons.items() if reason}
