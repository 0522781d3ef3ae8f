"""accelerate's config file and launcher (https://huggingface.co/docs/accelerate/package_reference/cli)."""

from __future__ import annotations

from typing import Any, Final

from calc.external_formats import trainer
from calc.external_formats.draft import (
    NO_EFFECT,
    Draft,
    NotSaid,
    Setting,
    Table,
    ignores,
    named,
    one_of,
    refuses,
    sets,
    states,
    switches,
    text,
    truth,
)  # fmt: skip
from calc.external_formats.named_files import take_file


def _type(draft: Draft, value: Any) -> str:
    kind = text(value).upper() if isinstance(value, str) else "NO"
    if kind == "FSDP":
        draft.facts["fsdp"] = True
        draft.plan.setdefault("zero", 3)
        return "zero 3"
    if kind == "DEEPSPEED":
        draft.facts["deepspeed"] = True
        return "DeepSpeed"
    if kind in ("MULTI_GPU", "NO"):
        draft.facts["ddp_only"] = True
        return "zero 0"
    raise NotSaid("not a kind of training that is modelled")


def _strategy(draft: Draft, value: Any) -> str:
    known = {"FULL_SHARD": (3, True), "SHARD_GRAD_OP": (2, True), "NO_SHARD": (0, True), "HYBRID_SHARD": (3, True), "1": (3, True),
             "2": (2, True), "3": (0, True)}  # fmt: skip
    zero, _ = one_of(known, "not a strategy known here")(value)
    draft.plan["zero"] = zero
    if str(value) == "HYBRID_SHARD":
        draft.facts["hybrid"] = True
        return "zero 3, shards within a machine"
    return f"zero {zero}"


def _reshard(draft: Draft, value: Any) -> str:
    """FSDP 2 has a switch here, FSDP 1 the name of a strategy."""
    if isinstance(value, str) and value.upper() == value and value.lower() not in ("true", "false"):
        return _strategy(draft, value)
    draft.plan["reshard_after_forward"] = truth(value)
    return f"reshard_after_forward {draft.plan['reshard_after_forward']}"


def _precision(draft: Draft, value: Any) -> str:
    known = {"no": "no", "false": "no", "bf16": "bf16", "fp16": "fp16"}
    found = one_of(known, "this precision is not modelled in these trainers")(value)
    if found != "no":
        draft.facts[found] = True
    return "no autocast" if found == "no" else f"autocast in {found}"


def _offload(draft: Draft, value: Any) -> str:
    if truth(value):
        draft.plan["offload"] = "parameters"
        return "offload parameters"
    return NO_EFFECT


def _device(what: str) -> Setting:
    def apply(draft: Draft, value: Any) -> str:
        where = one_of({"none": "none", "cpu": "cpu", "nvme": "nvme"}, "not a device known here")(value)
        if where == "none":
            return NO_EFFECT
        if what == "parameters" or draft.plan.get("offload") != "parameters":
            draft.plan["offload"] = what
        if where == "nvme":
            draft.plan["nvme"] = True
        return f"offload {what}"

    return Setting(apply)


# TRL's accelerate configs (examples/accelerate_configs/), each for 8 processes: ZeRO's stage, and whose
_SHIPPED: Final = {
    "deepspeed_zero1.yaml": (1, "deepspeed"),
    "deepspeed_zero2.yaml": (2, "deepspeed"),
    "deepspeed_zero3.yaml": (3, "deepspeed"),
    "fsdp1.yaml": (3, "fsdp"),
    "fsdp2.yaml": (3, "fsdp"),
    "multi_gpu.yaml": (0, "ddp_only"),
}


def _config_file(draft: Draft, value: Any) -> str:
    path = text(value)
    name = path.rsplit("/", 1)[-1]
    if "accelerate_configs/" not in path or name not in _SHIPPED:
        return take_file(draft, value, SETTINGS)
    zero, program = _SHIPPED[name]
    draft.plan["zero"] = zero
    draft.facts[program] = True
    draft.facts.setdefault("gpus", 8)
    return f"zero {zero}, GPUs {draft.whole('gpus')}, as TRL ships that file"


def _recompute(draft: Draft, value: Any) -> str:
    if not truth(value):
        return NO_EFFECT
    return trainer.recompute(draft, True)


_FSDP: Final = {
    "sharding-strategy": Setting(_strategy),
    "reshard-after-forward": Setting(_reshard),
    "offload-params": Setting(_offload),
    "activation-checkpointing": Setting(_recompute),
    **ignores(
        "auto-wrap-policy backward-prefetch cpu-ram-efficient-loading forward-prefetch state-dict-type sync-module-states version "
        "use-orig-params transformer-layer-cls-to-wrap limit-all-gathers min-num-params ignored-modules final-state-dict-type"
    ),
}
FSDP: Final = {f"fsdp-{name}": setting for name, setting in _FSDP.items()} | _FSDP  # both spellings are in use
_PARALLELISM: Final = {
    "dp-replicate-size": sets("dp_replicate"),
    "dp-shard-size": states("dp_shard"),
    "tp-size": sets("tp"),
    "cp-size": sets("cp"),
    "sp-size": refuses("Ulysses' sequence parallelism is not modelled", unless=lambda value: value == 1),
    **ignores("cp-comm-strategy cp-backend sp-backend sp-seq-length sp-seq-length-is-variable sp-attn-implementation"),
}

LAUNCH: Final = {
    "num-processes": states("gpus"),
    "num-machines": states("machines"),
    "mixed-precision": Setting(_precision),
    "gradient-accumulation-steps": states("accumulation"),
    "zero-stage": sets("zero"),
    "offload-optimizer-device": _device("optimizer"),
    "offload-param-device": _device("parameters"),
}
SETTINGS: Final[Table] = {
    **LAUNCH,
    "distributed-type": Setting(_type),
    **{f"fsdp-config.{name}": setting for name, setting in FSDP.items()},
    "fsdp-config": refuses("only its settings are read"),
    "deepspeed-config.zero-stage": sets("zero"),
    "deepspeed-config.offload-optimizer-device": _device("optimizer"),
    "deepspeed-config.offload-param-device": _device("parameters"),
    "deepspeed-config.gradient-accumulation-steps": states("accumulation"),
    "deepspeed-config.deepspeed-config-file": Setting(trainer.deepspeed_file),
    **{f"parallelism-config.parallelism-config-{name}": setting for name, setting in _PARALLELISM.items()},
    **named("fp8-config use-cpu", refuses("not modelled", unless=lambda value: value in (False, "false", {}))),
    "dynamo-config.dynamo-backend": refuses("torch.compile is not modelled in these trainers", unless=lambda value: value == "NO"),
    **ignores(
        "compute-environment debug downcast-bf16 enable-cpu-affinity machine-rank main-training-function rdzv-backend same-network "
        "tpu-env tpu-use-cluster tpu-use-sudo main-process-ip main-process-port gpu-ids command-file commands megatron-lm-config "
        "deepspeed-config.deepspeed-multinode-launcher deepspeed-config.zero3-init-flag deepspeed-config.zero3-save-16bit-model "
        "deepspeed-config.gradient-clipping tpu-name tpu-zone dynamo-config deepspeed-config deepspeed-hostfile "
        "deepspeed-config.deepspeed-moe-layer-cls-names dynamo-backend"
    ),
}  # fmt: skip
LAUNCHER: Final[Table] = {
    **LAUNCH,
    "use-fsdp": Setting(lambda draft, value: _type(draft, "FSDP") if truth(value) else NO_EFFECT, is_switch=True),
    "use-deepspeed": Setting(lambda draft, value: _type(draft, "DEEPSPEED") if truth(value) else NO_EFFECT, is_switch=True),
    "multi-gpu": switches("zero", 0),
    **{name: setting for name, setting in FSDP.items() if name.startswith("fsdp-")},
    **named("deepspeed-config-file", Setting(trainer.deepspeed_file)),
    **named("config-file config", Setting(_config_file)),
    **ignores("machine-rank main-process-ip main-process-port gpu-ids num-cpu-threads-per-process dynamo-backend rdzv-backend m module"),
}  # fmt: skip


def ranks(draft: Draft) -> None:
    """Replicas and shards; a hybrid strategy shards within a machine."""
    if draft.facts.get("hybrid") and draft.whole("machines") > 1:
        draft.plan["dp_replicate"] = draft.whole("machines")
    if "gpus" not in draft.facts and "dp_shard" in draft.facts:
        plan = draft.plan
        draft.facts["gpus"] = (
            draft.whole("dp_shard") * plan.get("dp_replicate", 1) * plan.get("tp", 1) * plan.get("cp", 1)
        )


def finish(draft: Draft) -> None:
    """A config of accelerate says how a run is spread; model, length and batch are the script's."""
    ranks(draft)
    trainer.number_format(draft, "fp32")
    if draft.plan["recipe"] == "amp" and not draft.facts.get("fsdp"):
        draft.assumed.append("weights: loaded in fp32; a script that loads them in bf16 has recipe bf16-autocast")
    trainer.layout(draft)
    draft.assumed.append(
        "seq 4096, micro_batch 1: an accelerate config has neither; --seq and --micro-batch say them to train"
    )
