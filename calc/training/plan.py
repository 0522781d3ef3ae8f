"""How a model is trained: the flags of `train` and `trace`, and the rules between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from calc.errors import InputError
from calc.model.feed_forward import MLP, MoE
from calc.model.mixers import Attention, CompressedAttention, LatentAttention, Recurrence
from calc.model.spec import ModelSpec
from calc.parameters import lora_parameters
from calc.training.liger import PATCHES
from calc.training.tensors import Lora, has_peft_targets

Recipe = Literal["pure-bf16", "amp", "fp32", "mixed-16", "megatron-bf16", "megatron-fp16", "fsdp-bf16", "fp8"]
Optimizer = Literal["adamw", "sgd", "momentum", "adafactor", "lion", "muon", "adamw-8bit", "paged-adamw"]
Schedule = Literal[
    "naive", "gpipe", "1f1b", "interleaved", "looped-bfs", "interleaved-zb", "zb-h1", "zb-h2", "zb-v", "dualpipe-v",
    "pipedream",
]  # fmt: skip

# What the flags allow and no ledger knows yet: refused by name, never ignored.
_NOT_MODELLED = {
    "objective": {"ppo"},
}


def _names(value: object) -> object:
    """Names with commas between them, as a flag or a URL gives them."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]


class TrainingPlan(BaseModel):
    """One training step of one model, as `python -m calc train` describes it.

    `dp` counts all data-parallel ranks; `dp_replicate` of them hold equal shards (HSDP), so that ZeRO shards over
    dp · cp / dp_replicate. `ep` lies inside dp · cp. A device sees `seq / cp` tokens of each sequence.
    """

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
    dp_replicate: int = Field(1, ge=1, le=2**20, description="data-parallel ranks that hold equal shards (HSDP)")
    zero: int = Field(0, ge=0, le=3, description="ZeRO: 1 shards the optimizer, 2 gradients too, 3 (FSDP) weights too")
    reshard_after_forward: bool = Field(True, description="free gathered weights after the forward (ZeRO-3)")
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
    attention: Literal["sdpa", "flash", "eager"] = Field("sdpa", description="the attention program")
    dropout: Literal["config", "off"] = Field("config", description="the config's dropout, or none")
    implementation: Literal["hf", "liger", "torchtitan", "fused", "paper"] = Field(
        "hf",
        description="whose program: transformers, alone or with Liger-Kernel's operators, torchtitan, Megatron with "
        "Transformer Engine, or arXiv 2205.05198",
    )
    loss: Literal["full", "chunked", "fused"] = Field(
        "full",
        description="cross-entropy: full logits, chunked, or fused with the head (Liger-Kernel's; of implementation fused: "
        "Transformer Engine's, in place on 16-bit logits); left out with liger: fused",
    )
    schedule: Schedule = Field("1f1b", description="pipeline schedule")
    virtual_stages: int = Field(1, ge=1, le=256, description="chunks of the model on a pipeline stage")
    method: Literal["full", "lora", "dora", "qlora"] = Field("full", description="full training or adapters")
    lora_rank: int = Field(8, ge=1, le=65536, description="rank r of the adapters")
    lora_targets: Names = Field(
        (),
        description="modules with adapters, with commas, or all-linear; left out: q_proj,v_proj, all-linear for qlora",
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
    nvme: bool = Field(False, description="keep what is offloaded on NVMe")
    nvme_GBps: float | None = Field(
        None, gt=0, le=1e6, description="NVMe bandwidth of one GPU in GB/s; left out: 1.6 (ZeRO-Infinity)"
    )
    context_mib: float | None = Field(
        None, ge=0, le=1_000_000, description="CUDA context in MiB; left out: the sourced default"
    )
    nccl_mib: float | None = Field(None, ge=0, le=1_000_000, description="NCCL buffers of one process group in MiB")
    workspace_mib: float | None = Field(None, ge=0, le=1_000_000, description="cuBLAS workspace in MiB")
    fragmentation_percent: float | None = Field(
        None, ge=0, le=1000, description="reserved beyond allocated, in percent of the peak"
    )

    @model_validator(mode="before")
    @classmethod
    def _losses(cls, values: Any) -> Any:
        """Liger-Kernel fuses the loss with the head and TRL runs both chunk by chunk, unless another is asked for."""
        if isinstance(values, dict) and values.get("implementation") == "liger":
            return {"loss": "fused", **values}
        if isinstance(values, dict) and values.get("objective") in ("dpo", "grpo"):
            return {"loss": "chunked", **values}
        return values

    @model_validator(mode="after")
    def _rules(self) -> Self:
        for field, names in _NOT_MODELLED.items():
            if getattr(self, field) in names:
                raise ValueError(f"{field}: {getattr(self, field)!r} is not modelled yet")
        for problem in _broken(self, _PLAN_RULES):
            raise ValueError(problem)
        return self

    @property
    def transformers(self) -> bool:
        """Whether the step is transformers' program, with Liger-Kernel's operators or its own."""
        return self.implementation in ("hf", "liger")

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
        targets = self.lora_targets or (("all-linear",) if quantised else ())
        return Lora(self.lora_rank, targets, magnitude=self.method == "dora", quantised=quantised)

    @cached_property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp


Rule = tuple[Callable[[TrainingPlan], bool], str]
_SCORED_RECIPES = {"dpo": ("pure-bf16", "fp32"), "grpo": ("pure-bf16",)}


def _divides(small: str, large: str) -> Rule:
    return (
        lambda plan: getattr(plan, large) % getattr(plan, small) != 0,
        f"{small} ({{{small}}}) must divide {large} ({{{large}}})",
    )


def _titan(broken: Callable[[TrainingPlan], bool], message: str) -> Rule:
    return lambda plan: plan.implementation == "torchtitan" and broken(plan), message


# torchtitan trains fp32 weights, sharded by FSDP2 and gathered in bf16.
_TORCHTITAN_RULES: tuple[Rule, ...] = (
    _titan(
        lambda plan: plan.recipe != "fsdp-bf16",
        "recipe: {recipe!r} is not part of implementation 'torchtitan'; use fsdp-bf16",
    ),
    _titan(
        lambda plan: plan.zero != 3 or plan.shards == 1,
        "implementation: 'torchtitan' shards by FSDP2: zero ({zero}) must be 3, and dp * cp / dp_replicate ({dp} * {cp} / "
        "{dp_replicate}) above 1",
    ),
    _titan(lambda plan: plan.pp > 1, "pp ({pp}) with implementation 'torchtitan' is not modelled yet; it must be 1"),
    _titan(
        lambda plan: plan.tp > 1 and not plan.sharded_sequence,
        "sequence_parallel (False) is not part of implementation 'torchtitan', whose tensor parallelism divides the sequence",
    ),
    _titan(
        lambda plan: plan.attention == "eager",
        "attention: 'eager' is not part of implementation 'torchtitan' (it runs PyTorch's kernels); use sdpa or flash",
    ),
    _titan(
        lambda plan: plan.loss != "full", "loss: {loss!r} is not part of implementation 'torchtitan' here; use full"
    ),
)

# DeepSpeed's offloading: each rank updates its own shard on the host.
_OFFLOAD_RULES: tuple[Rule, ...] = (
    (lambda plan: plan.nvme and plan.offload == "none", "nvme (True) needs offload 'optimizer' or 'parameters'"),
    (
        lambda plan: plan.offload == "parameters" and plan.zero != 3,
        "offload: 'parameters' needs zero 3, which gathers a layer at a time, and zero is {zero}",
    ),
    (
        lambda plan: plan.offload == "optimizer" and plan.shards > 1 and plan.zero < 2,
        "offload: 'optimizer' over several ranks needs zero 2 or 3, and zero is {zero}",
    ),
    (
        lambda plan: plan.offload != "none" and plan.optimizer in ("adamw-8bit", "paged-adamw"),
        "offload: {offload!r} updates on the host, and optimizer {optimizer!r} on the device; use another",
    ),
    (
        lambda plan: (
            plan.offload != "none" and (plan.method != "full" or plan.recipe == "fp8" or plan.pp > 1 or plan.scores)
        ),
        "offload: {offload!r} is modelled for full pretraining or sft without fp8 and pipeline stages: method is {method!r}, "
        "objective {objective!r}, recipe {recipe!r}, pp {pp}",
    ),
)

_SCORING_RULES: tuple[Rule, ...] = (
    (
        lambda plan: plan.scores and (plan.implementation != "hf" or plan.loss != "chunked"),
        "objective: {objective!r} is modelled with implementation 'hf' and loss 'chunked' (TRL's head that gives no logits), and they "
        "are {implementation!r} and {loss!r}",
    ),
    (
        lambda plan: plan.scores and (plan.zero > 2 or plan.tp * plan.pp * plan.cp * plan.ep > 1),
        "objective: {objective!r} is modelled on data-parallel ranks with zero at most 2: zero ({zero}), tp ({tp}), pp ({pp}), cp ({cp}), "
        "ep ({ep})",
    ),
    (
        lambda plan: plan.recipe not in _SCORED_RECIPES.get(plan.objective, (plan.recipe,)),
        "objective: {objective!r} is modelled in pure-bf16 (dpo: fp32 too), and recipe is {recipe!r}",
    ),
    (
        lambda plan: plan.scores and plan.method not in ("full", "lora"),
        "objective: {objective!r} is modelled with methods full and lora, and method is {method!r}",
    ),
    (
        lambda plan: plan.scores and plan.prompt_tokens >= plan.seq,
        "prompt_tokens ({prompt_tokens}) must be below seq ({seq}): the rest is the completion",
    ),
    (
        lambda plan: not plan.scores and (plan.prompt_tokens > 1 or plan.reference is not None),
        "prompt_tokens and reference need objective dpo or grpo, not {objective!r}",
    ),
)
_ADAPTED = {*(("hf", method) for method in ("lora", "dora", "qlora")), ("liger", "lora")}
# The first rule that a plan breaks is told, with the values in it.
_PLAN_RULES: tuple[Rule, ...] = (
    *_SCORING_RULES,
    (
        lambda plan: plan.batch % (plan.micro_batch * plan.dp) != 0,
        "micro_batch * dp ({micro_batch} * {dp}) must divide global_batch ({global_batch})",
    ),
    _divides("dp_replicate", "dp"),
    (
        lambda plan: plan.shards % plan.ep != 0,
        "ep ({ep}) must divide dp * cp / dp_replicate ({dp} * {cp} / {dp_replicate})",
    ),
    _divides("cp", "seq"),
    (
        lambda plan: plan.sequence_parallel is True and plan.tp == 1,
        "sequence_parallel (True) needs tp above 1, and tp is {tp}",
    ),
    (
        lambda plan: plan.transformers and plan.recompute == "selective",
        "recompute: 'selective' is not part of implementation {implementation!r} (transformers recomputes whole layers); use none or full",
    ),
    (
        lambda plan: plan.implementation == "liger" and plan.tp * plan.ep > 1,
        "implementation: 'liger' is modelled without tensor and expert parallelism: tp ({tp}) and ep ({ep}) must be 1",
    ),
    (
        lambda plan: plan.implementation == "liger" and plan.loss == "chunked",
        "loss: 'chunked' is not part of implementation 'liger'; use fused or full",
    ),
    (
        lambda plan: plan.implementation == "paper" and plan.attention != "sdpa",
        "attention: {attention!r} is not part of implementation 'paper', whose equations hold their own attention; leave it out",
    ),
    (
        lambda plan: plan.implementation == "fused" and plan.attention == "eager",
        "attention: 'eager' is not part of implementation 'fused' (Transformer Engine's attention is flash); use sdpa or flash",
    ),
    *_TORCHTITAN_RULES,
    *_OFFLOAD_RULES,
    (
        lambda plan: plan.method != "full" and (plan.implementation, plan.method) not in _ADAPTED,
        "method: {method!r} needs implementation 'hf' (lora: or 'liger'), and implementation is {implementation!r}",
    ),
    (
        lambda plan: plan.method != "full" and plan.tp * plan.ep > 1,
        "method: {method!r} is modelled without tensor and expert parallelism: tp ({tp}) and ep ({ep}) must be 1",
    ),
    (
        lambda plan: plan.method == "qlora" and plan.recipe not in ("pure-bf16", "amp"),
        "method: 'qlora' has recipe pure-bf16 (what is not quantised in bf16, as loaded) or amp (in fp32, as peft prepares it), not "
        "{recipe!r}",
    ),
    (
        lambda plan: plan.method == "qlora" and plan.zero == 3,
        "method: 'qlora' is modelled without sharded weights: zero ({zero}) must be at most 2",
    ),
    (
        lambda plan: bool(plan.lora_targets) and plan.method == "full",
        "lora_targets needs method 'lora', 'dora' or 'qlora', not {method!r}",
    ),
    (
        lambda plan: plan.virtual_stages > 1 and plan.pp == 1,
        "virtual_stages ({virtual_stages}) needs pp above 1, and pp is {pp}",
    ),
    (
        lambda plan: plan.attention == "flash" and plan.recipe == "fp32",
        "attention: 'flash' takes 16-bit numbers, and recipe {recipe!r} computes in fp32; use sdpa or eager",
    ),
)


def _broken(plan: TrainingPlan, rules: tuple[Rule, ...]) -> Iterator[str]:
    for broken, message in rules:
        if broken(plan):
            values = {name: getattr(plan, name) for name in type(plan).model_fields}
            yield message.format(**{**values, "global_batch": plan.batch})


_PUBLISHED_STACKED = frozenset({"GptOssForCausalLM"})  # experts that were never linear layers, which peft leaves alone


def check(plan: TrainingPlan, spec: ModelSpec) -> None:
    """InputError unless the layout fits the model: heads, widths, experts and layers divide as the plan asks."""
    for field, value, name, size in _divisions(plan, spec):
        if size % value:
            raise InputError(f"{field} ({value}) must divide {name} ({size})", field)
    for kv in _kv_heads(spec):
        if kv % plan.tp and plan.tp % kv:
            raise InputError(f"tp ({plan.tp}) must divide num_key_value_heads ({kv}) or be a multiple of it", "tp")
    if plan.sharded_sequence and plan.seq % (plan.cp * plan.tp):
        raise InputError(
            f"cp * tp ({plan.cp} * {plan.tp}) must divide seq ({plan.seq}) with sequence parallelism", "seq"
        )
    layers = spec.num_hidden_layers
    if plan.pp * plan.virtual_stages > layers:
        product = f"pp * virtual_stages ({plan.pp} * {plan.virtual_stages})"
        raise InputError(f"{product} must be at most num_hidden_layers ({layers})", "pp")
    if plan.implementation == "liger" and spec.architecture not in PATCHES:
        known = ", ".join(name.removesuffix("ForCausalLM") for name in PATCHES)
        raise InputError.of("implementation", "liger", f"it is not modelled for {spec.architecture}; it is for {known}")
    if plan.objective == "grpo" and not all(_generates_plainly(kind.mixer, plan.seq) for kind in spec.layers.kinds):
        raise InputError.of(
            "objective",
            "grpo",
            f"its rollout is modelled for keys and values of the whole sequence, which {spec.name} does not keep",
        )
    experts = any(isinstance(kind.feed_forward, MoE) for kind in spec.layers.kinds)
    stacked = experts and spec.architecture not in _PUBLISHED_STACKED
    if (
        stacked and plan.lora and plan.lora.targets == ("all-linear",)
    ):  # adapters of rank r · E on the stacked weights (peft 0.21)
        raise InputError(
            f"lora_targets: with 'all-linear' peft adapts the experts of {spec.name} too, which is not modelled; "
            "name the modules, such as q_proj,v_proj",
            "lora_targets",
        )
    if plan.ep > 1 and not experts:
        raise InputError.of("ep", plan.ep, f"{spec.name} has no experts, so it must be 1")
    if plan.method == "qlora" and any(
        isinstance(kind.mixer, Recurrence | CompressedAttention) for kind in spec.layers.kinds
    ):
        raise InputError.of(
            "method", "qlora", f"it is not modelled for the recurrent or compressed layers of {spec.name}"
        )
    if plan.lora and not plan.lora.targets and not has_peft_targets(spec):
        raise InputError(
            f"lora_targets: left out, and peft's own choice names no linear layer of {spec.name}; name the modules",
            "lora_targets",
        )
    if plan.lora_targets not in ((), ("all-linear",)):
        lora_parameters(spec, plan.lora_rank, ",".join(plan.lora_targets))  # refuses a name that no linear layer has


def _generates_plainly(mixer: object, seq: int) -> bool:
    """Whether a layer's cache is the keys and values of all tokens, read by a fused kernel without a mask."""
    if not isinstance(mixer, Attention):
        return False
    limited = 0 < (mixer.window or mixer.chunk) < seq
    return not (limited or mixer.softcap or mixer.sinks or mixer.indexer)


def _kv_heads(spec: ModelSpec) -> Iterator[int]:
    for kind in spec.layers.kinds:
        if isinstance(kind.mixer, Attention):
            yield kind.mixer.num_key_value_heads


def _divisions(plan: TrainingPlan, spec: ModelSpec) -> Iterator[tuple[str, int, str, int]]:
    for kind in spec.layers.kinds:
        if isinstance(kind.mixer, Attention | LatentAttention):
            yield "tp", plan.tp, "num_attention_heads", kind.mixer.num_attention_heads
        if isinstance(kind.feed_forward, MLP):
            yield "tp", plan.tp, "intermediate_size", kind.feed_forward.intermediate_size
        if isinstance(kind.feed_forward, MoE):
            yield "tp", plan.tp, "moe_intermediate_size", kind.feed_forward.expert.intermediate_size
            yield "ep", plan.ep, "num_experts", kind.feed_forward.num_experts
