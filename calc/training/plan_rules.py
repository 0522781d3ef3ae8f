"""What goes together in a training plan, whatever the model: a table of rules, each with the sentence that tells it broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from calc.pipeline.schedules import SCHEDULES
from calc.training.plan_fields import RECOMPUTABLE, PlanFields
from calc.training.states.tensors import EMBEDDING_MODULES, HEAD_MODULES

Rule = tuple[Callable[[PlanFields], bool], str]
_SCORED_RECIPES = {"dpo": ("pure-bf16", "fp32"), "grpo": ("pure-bf16",)}


def _divides(small: str, large: str) -> Rule:
    return (
        lambda plan: getattr(plan, large) % getattr(plan, small) != 0,
        f"{small} ({{{small}}}) must divide {large} ({{{large}}})",
    )


def _titan(breaks: Callable[[PlanFields], bool], message: str) -> Rule:
    return lambda plan: plan.implementation == "torchtitan" and breaks(plan), message


COMPILABLE = {"model", "loss"}
_TITAN_SCHEDULES = tuple(name for name, schedule in SCHEDULES.items() if schedule.pytorch)
_TITAN_FIELDS = {
    "recompute_every": 1,
    "experts_of": "2025-11",
    "float8": "none",
    "float8_all_gather": False,
    "simple_fsdp": False,
}


def _titans(field: str, default: object) -> Rule:
    return (
        lambda plan: plan.implementation != "torchtitan" and getattr(plan, field) != default,
        f"{field} ({{{field}}}) needs implementation 'torchtitan', and implementation is {{implementation!r}}",
    )


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
    (
        lambda plan: plan.root_group and plan.implementation not in ("torchtitan", "torchtune"),
        "root_group (True) needs implementation 'torchtitan' or 'torchtune', and implementation is {implementation!r}",
    ),
    _titan(
        lambda plan: plan.pp > 1 and plan.schedule not in _TITAN_SCHEDULES,
        "schedule: {schedule!r} is not one that implementation 'torchtitan' offers; use " + ", ".join(_TITAN_SCHEDULES),
    ),
    _titan(
        lambda plan: plan.pp > 1 and (plan.root_group or plan.simple_fsdp or plan.head_loss == "chunked"),
        "pp ({pp}) with implementation 'torchtitan' is modelled without root_group, simple_fsdp and loss 'chunked'",
    ),
    _titan(
        lambda plan: plan.tp > 1 and not plan.sharded_sequence,
        "sequence_parallel (False) is not part of implementation 'torchtitan', whose tensor parallelism divides the sequence",
    ),
    _titan(
        lambda plan: plan.attention == "eager",
        "attention: 'eager' is not part of implementation 'torchtitan' (it runs PyTorch's kernels); use sdpa or flash",
    ),
    _titan(
        lambda plan: plan.head_loss == "fused",
        "loss: {loss!r} is not part of implementation 'torchtitan'; use full, chunked or chunked-output",
    ),
    _titan(
        lambda plan: plan.head_loss == "chunked" and plan.root_group,
        "loss: 'chunked' shards the head as a group of its own, which root_group (True) does not",
    ),
    (
        lambda plan: plan.head_loss == "chunked-output" and plan.implementation not in ("torchtitan", "torchtune"),
        "loss: 'chunked-output' needs implementation 'torchtitan' or 'torchtune', and implementation is {implementation!r}",
    ),
    *(_titans(field, default) for field, default in _TITAN_FIELDS.items()),
    (
        lambda plan: bool(plan.compile) and plan.implementation not in ("torchtitan", "torchtune"),
        "compile ({compile}) needs implementation 'torchtitan' or 'torchtune', and implementation is {implementation!r}",
    ),
    (
        lambda plan: not {*plan.compile} <= COMPILABLE,
        "compile: {compile} must name what torch.compile compiles: model, loss",
    ),
    (
        lambda plan: plan.recompute_every > 1 and plan.recompute != "full",
        "recompute_every ({recompute_every}) needs recompute 'full', and recompute is {recompute!r}",
    ),
    (
        lambda plan: plan.simple_fsdp and ("model" not in plan.compile or plan.root_group),
        "simple_fsdp (True) needs compile model and no root_group, and compile is {compile}",
    ),
    (
        lambda plan: plan.float8 != "none" and "model" not in plan.compile,
        "float8: {float8!r} is modelled with compile model, and compile is {compile}: run eagerly, its casts are kept as well",
    ),
    (
        lambda plan: plan.float8_all_gather and plan.float8 != "tensorwise",
        "float8_all_gather (True) needs float8 'tensorwise', and float8 is {float8!r}",
    ),
)

# litgpt trains in one 16-bit format (bf16-true), and adapts what it names query, key, value, projection, mlp and head.
_LITGPT_TARGETS = {"query", "key", "value", "projection", "mlp", "head"}


def _litgpt(breaks: Callable[[PlanFields], bool], message: str) -> Rule:
    return lambda plan: plan.implementation == "litgpt" and breaks(plan), message


_LITGPT_RULES: tuple[Rule, ...] = (
    _litgpt(
        lambda plan: plan.recipe != "pure-bf16",
        "recipe: {recipe!r} is not modelled with implementation 'litgpt'; use pure-bf16 (bf16-true)",
    ),
    _litgpt(
        lambda plan: (
            plan.tp * plan.pp * plan.cp * plan.ep > 1 or plan.head_loss != "full" or bool(plan.modules_to_save)
        ),
        "implementation: 'litgpt' is modelled on data-parallel ranks with its own loss, without modules_to_save: tp ({tp}), pp ({pp}), "
        "cp ({cp}), ep ({ep}), loss {loss!r}",
    ),
    _litgpt(
        lambda plan: not {*plan.lora_targets} <= _LITGPT_TARGETS,
        "lora_targets: {lora_targets} must be among query, key, value, projection, mlp and head with implementation 'litgpt'; left out: "
        "query,value",
    ),
)


# torchtune trains in one format, bf16 or fp32, sharded by FSDP2 over data-parallel ranks.
def _torchtune(breaks: Callable[[PlanFields], bool], message: str) -> Rule:
    return lambda plan: plan.implementation == "torchtune" and breaks(plan), message


_TORCHTUNE_RULES: tuple[Rule, ...] = (
    _torchtune(
        lambda plan: plan.recipe not in ("pure-bf16", "fp32"),
        "recipe: {recipe!r} is not part of implementation 'torchtune', which trains in one format; use pure-bf16 or fp32",
    ),
    _torchtune(
        lambda plan: plan.tp * plan.pp * plan.cp * plan.ep > 1 or plan.zero not in (0, 3) or plan.scores,
        "implementation: 'torchtune' is modelled for finetuning on data-parallel ranks, sharded (zero 3) or not: zero ({zero}), tp ({tp}), "
        "pp ({pp}), cp ({cp}), ep ({ep}), objective {objective!r}",
    ),
    _torchtune(
        lambda plan: plan.head_loss not in ("chunked-output", "full"),
        "loss: {loss!r} is not part of implementation 'torchtune' here; use chunked-output or full",
    ),
    _torchtune(
        lambda plan: "model" in plan.compile and plan.method != "full" and plan.recompute == "none",
        "compile: 'model' is modelled for adapters with recompute 'full' only, and recompute is {recompute!r}",
    ),
)

_ADAPTER_OPTIONS = {"lora_targets": (), "lora_dropout": 0.0}
_LITGPT_ADAPTER_RULES: tuple[Rule, ...] = (
    (
        lambda plan: (
            plan.adapter != "lora" and (plan.implementation != "litgpt" or plan.method not in ("lora", "qlora"))
        ),
        "adapter: {adapter!r} needs implementation 'litgpt' and method 'lora' or 'qlora' (in 16 bits, or next to 4-bit weights): "
        "implementation is {implementation!r}, method {method!r}",
    ),
    (
        lambda plan: (
            plan.adapter != "lora" and any(getattr(plan, name) != value for name, value in _ADAPTER_OPTIONS.items())
        ),
        "lora_targets and lora_dropout need adapter 'lora', and adapter is {adapter!r}",
    ),
)

# transformers' model in DeepSpeed's engine: 16-bit weights with flat fp32 shards next to them.
_ENGINE_FIELDS = (
    "reduce_bucket_size", "contiguous_gradients", "overlap_comm", "sub_group_size", "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_param_persistence_threshold",
)  # fmt: skip


def _engine(breaks: Callable[[PlanFields], bool], message: str) -> Rule:
    return lambda plan: plan.implementation == "deepspeed" and breaks(plan), message


def _deepspeeds(field: str) -> Rule:
    return (
        lambda plan: plan.implementation != "deepspeed" and getattr(plan, field) is not None,
        f"{field} ({{{field}}}) needs implementation 'deepspeed', and implementation is {{implementation!r}}",
    )


_DEEPSPEED_RULES: tuple[Rule, ...] = (
    *map(_deepspeeds, _ENGINE_FIELDS),
    _engine(
        lambda plan: plan.recipe != "mixed-16",
        "recipe: {recipe!r} is not part of implementation 'deepspeed', whose engine keeps fp32 shards of 16-bit weights; use mixed-16",
    ),
    _engine(lambda plan: plan.zero == 0, "zero ({zero}) must be 1, 2 or 3 with implementation 'deepspeed'"),
    _engine(
        lambda plan: plan.tp * plan.pp * plan.cp * plan.ep > 1 or plan.dp_replicate > 1,
        "implementation: 'deepspeed' is modelled on data-parallel ranks: tp ({tp}), pp ({pp}), cp ({cp}), ep ({ep}) and dp_replicate "
        "({dp_replicate}) must be 1",
    ),
    _engine(
        lambda plan: plan.optimizer not in ("adamw", "lion"),
        "optimizer: {optimizer!r} is not modelled with implementation 'deepspeed'; use adamw or lion",
    ),
    _engine(
        lambda plan: plan.zero != 3 and any(getattr(plan, f) is not None for f in _ENGINE_FIELDS[3:]),
        "sub_group_size and the stage3 settings need zero 3, and zero is {zero}",
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
        lambda plan: plan.offload != "none" and plan.optimizer in ("adamw-8bit", "adamw-4bit", "paged-adamw"),
        "offload: {offload!r} updates on the host, and optimizer {optimizer!r} on the device; use another",
    ),
    (
        lambda plan: (
            plan.offload != "none" and (plan.method == "dora" or plan.recipe == "fp8" or plan.pp > 1 or plan.scores)
        ),
        "offload: {offload!r} is modelled for pretraining or sft without DoRA, fp8 and pipeline stages: method is {method!r}, "
        "objective {objective!r}, recipe {recipe!r}, pp {pp}",
    ),
)

_SCORING_RULES: tuple[Rule, ...] = (
    (
        lambda plan: plan.scores and (plan.implementation != "hf" or plan.head_loss != "chunked"),
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
_ADAPTED = {
    ("hf", "dora"),
    *(
        (program, method)
        for program in ("hf", "liger", "deepspeed", "litgpt", "torchtune")
        for method in ("lora", "qlora")
    ),
}
_ADAPTER_RULES: tuple[Rule, ...] = (
    (
        lambda plan: (
            plan.method == "full"
            and (plan.lora_dropout > 0 or plan.adapter_format != "fp32" or bool(plan.modules_to_save))
        ),
        "lora_dropout, adapter_format and modules_to_save need method 'lora', 'dora' or 'qlora', not {method!r}",
    ),
    (
        lambda plan: plan.method != "qlora" and (plan.quantization != "nf4" or plan.bitsandbytes != "0.50"),
        "quantization and bitsandbytes need method 'qlora', not {method!r}",
    ),
    (
        lambda plan: plan.method == "dora" and plan.adapter_format != "fp32",
        "adapter_format: {adapter_format!r} is not modelled for method 'dora'; use fp32",
    ),
    (
        lambda plan: not {*plan.modules_to_save} <= EMBEDDING_MODULES | HEAD_MODULES,
        "modules_to_save: {modules_to_save} must name the token table or the head: "
        + ", ".join(sorted(EMBEDDING_MODULES | HEAD_MODULES)),
    ),
    (
        lambda plan: plan.quantization == "gptq-int4" and plan.zero == 3,
        "quantization: 'gptq-int4' is modelled without sharded weights: zero ({zero}) must be at most 2",
    ),
)
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
        lambda plan: plan.ep_over_tp and plan.transformers,
        "ep_over_tp (True) needs implementation 'torchtitan', 'fused' or 'paper', and implementation is {implementation!r}",
    ),
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
        lambda plan: plan.implementation == "liger" and plan.head_loss == "chunked",
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
    (
        lambda plan: not {*plan.recompute_modules} <= {*RECOMPUTABLE},
        "recompute_modules: {recompute_modules} must be among " + ", ".join(RECOMPUTABLE),
    ),
    (
        lambda plan: bool(plan.recompute_modules) and plan.recompute == "full",
        "recompute_modules: {recompute_modules} with recompute 'full', which repeats all of them",
    ),
    (
        lambda plan: bool(plan.recompute_modules) and plan.implementation != "fused",
        "recompute_modules ({recompute_modules}) needs implementation 'fused', and implementation is {implementation!r}",
    ),
    *_TORCHTITAN_RULES,
    *_LITGPT_RULES,
    *_LITGPT_ADAPTER_RULES,
    *_TORCHTUNE_RULES,
    *_DEEPSPEED_RULES,
    (
        lambda plan: plan.offload_activations and (plan.recompute != "full" or not plan.transformers or plan.pp > 1),
        "offload_activations is modelled with implementation 'hf', 'liger' or 'deepspeed', recompute 'full' and pp 1: implementation "
        "is {implementation!r}, recompute {recompute!r}, pp {pp}",
    ),
    (
        lambda plan: (
            plan.optimizer_in_backward
            and (
                plan.microbatches > 1
                or plan.zero > 0
                or plan.dp * plan.pp > 1
                or plan.implementation not in ("hf", "liger", "torchtune")
            )
        ),
        "optimizer_in_backward is modelled on one device without accumulation, with implementation 'hf', 'liger' or 'torchtune': "
        "dp ({dp}), pp ({pp}), zero ({zero}), global_batch ({global_batch}), micro_batch ({micro_batch}), {implementation!r}",
    ),
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
        lambda plan: (
            plan.method == "qlora"
            and plan.implementation != "deepspeed"
            and plan.recipe not in ("pure-bf16", "bf16-autocast", "amp")
        ),
        "method: 'qlora' has recipe pure-bf16 or bf16-autocast (what is not quantised in bf16, as loaded) or amp (in fp32, as peft "
        "prepares it), not "
        "{recipe!r}",
    ),
    (
        lambda plan: bool(plan.lora_targets) and plan.method == "full",
        "lora_targets needs method 'lora', 'dora' or 'qlora', not {method!r}",
    ),
    *_ADAPTER_RULES,
    (
        lambda plan: (
            (plan.loss_format != "fp32" or plan.keep_logits)
            and (plan.implementation not in ("hf", "deepspeed") or plan.head_loss != "full")
        ),
        "loss_format ({loss_format}) and keep_logits are modelled with implementation 'hf' or 'deepspeed' and loss 'full', not "
        "{implementation!r} and {loss!r}",
    ),
    (
        lambda plan: plan.optimizer_kernel == "fused" and plan.optimizer in ("adafactor", "lion", "muon"),
        "optimizer_kernel: 'fused' is not there for optimizer {optimizer!r} (PyTorch 2.13); use foreach or loop",
    ),
    (
        lambda plan: plan.virtual_stages > 1 and plan.pp == 1,
        "virtual_stages ({virtual_stages}) needs pp above 1, and pp is {pp}",
    ),
    (
        lambda plan: plan.pp == 1 and (plan.first_stage_layers is not None or plan.last_stage_layers is not None),
        "first_stage_layers ({first_stage_layers}) and last_stage_layers ({last_stage_layers}) need pp above 1",
    ),
    (
        lambda plan: plan.attention == "flash" and plan.recipe == "fp32",
        "attention: 'flash' takes 16-bit numbers, and recipe {recipe!r} computes in fp32; use sdpa or eager",
    ),
)


def broken(plan: PlanFields) -> Iterator[str]:
    """What is wrong with the plan, whatever the model: one sentence for each rule that it breaks."""
    for is_broken, message in _PLAN_RULES:
        if is_broken(plan):
            values = {name: getattr(plan, name) for name in type(plan).model_fields}
            yield message.format(**{**values, "global_batch": plan.batch, "loss": plan.head_loss})
