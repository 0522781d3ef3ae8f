"""DeepSpeed's JSON config (https://www.deepspeed.ai/docs/config-json/)."""

from __future__ import annotations

import json
from typing import Any, Final

from calc.external_formats import trainer
from calc.external_formats.draft import (
    NO_EFFECT,
    Draft,
    Setting,
    Table,
    ignores,
    named,
    one_of,
    refuses,
    states,
    truth,
    whole,
)
from calc.external_formats.writing import Writing, note_rest

_AUTO = "left to the trainer"
_ENGINE: Final = (
    "reduce_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
)  # fmt: skip
_SWITCHES: Final = ("contiguous_gradients", "overlap_comm")


def _or_auto(setting: Setting) -> Setting:
    """A setting that may be "auto": what the trainer around DeepSpeed has."""

    def apply(draft: Draft, value: Any) -> str:
        return _AUTO if value == "auto" else setting.apply(draft, value)

    return Setting(apply)


def _size(name: str) -> Setting:
    """A size of ZeRO's buffers; transformers' trainer makes "auto" of the hidden size."""

    def apply(draft: Draft, value: Any) -> str:
        if value == "auto":
            draft.assumed.append(
                f"{name}: DeepSpeed's default; transformers' trainer would make auto of the model's hidden size"
            )
            return _AUTO
        return _field(name, whole).apply(draft, value)

    return Setting(apply)


def _field(name: str, read: Any) -> Setting:
    def apply(draft: Draft, value: Any) -> str:
        draft.plan[name] = read(value)
        return f"{name} {draft.plan[name]}"

    return _or_auto(Setting(apply))


def _stage(draft: Draft, value: Any) -> str:
    draft.plan["zero"] = whole(value)
    return f"zero {draft.plan['zero']}"


def _offload(what: str) -> Setting:
    device = one_of({"none": "none", "cpu": "cpu", "nvme": "nvme"}, "not a device known here")

    def apply(draft: Draft, value: Any) -> str:
        where = device(value)
        if where == "none":
            return NO_EFFECT
        if what == "parameters" or draft.plan.get("offload") != "parameters":
            draft.plan["offload"] = what
        if where == "nvme":
            draft.plan["nvme"] = True
        return f"offload {what}" + (", nvme" if where == "nvme" else "")

    return _or_auto(Setting(apply))


def _optimizer(draft: Draft, value: Any) -> str:
    known = {"adamw": "adamw", "adam": "adamw", "fusedadam": "adamw", "deepspeedcpuadam": "adamw", "cpuadam": "adamw", "lion": "lion",
             "fusedlion": "lion", "sgd": "sgd", "muon": "muon"}  # fmt: skip
    draft.plan["optimizer"] = one_of(known, "this optimizer is not modelled")(value)
    return f"optimizer {draft.plan['optimizer']}"


SETTINGS: Final[Table] = {
    "train-micro-batch-size-per-gpu": _field("micro_batch", whole),
    "train-batch-size": _or_auto(states("train_batch")),
    "gradient-accumulation-steps": _or_auto(states("accumulation")),
    **named("bf16.enabled bfloat16.enabled", _or_auto(states("bf16", truth))),
    "fp16.enabled": _or_auto(states("fp16", truth)),
    "zero-optimization.stage": Setting(_stage),
    "zero-optimization.offload-optimizer.device": _offload("optimizer"),
    "zero-optimization.offload-param.device": _offload("parameters"),
    "zero-optimization.cpu-offload": Setting(
        lambda draft, value: _offload("optimizer").apply(draft, "cpu") if truth(value) else NO_EFFECT
    ),
    **{f"zero-optimization.{name.replace('_', '-')}": _size(name) for name in _ENGINE},
    **{f"zero-optimization.{name.replace('_', '-')}": _field(name, truth) for name in _SWITCHES},
    "optimizer.type": Setting(_optimizer),
    **named(
        "bf16.bf16-master-weights-and-grads bf16.bf16-optimizer-states",
        refuses("16-bit master weights and states are not modelled in DeepSpeed's engine", unless=lambda value: value is False),
    ),
    "bf16.immediate-grad-update": refuses("when fp32 gradients are added is as by default"),
    "torch-autocast.enabled": refuses("autocast inside the engine is not modelled", unless=lambda value: value is False),
    "zero-optimization.zero-hpz-partition-size": refuses("hierarchical partitions are not modelled", unless=lambda value: value == 1),
    "zero-optimization.offload-optimizer.ratio": refuses("the whole optimizer is taken as offloaded", unless=lambda value: value == 1),
    "sequence-parallel-size": refuses("Ulysses' sequence parallelism is not modelled", unless=lambda value: value == 1),
    "tensor-parallel.autotp-size": refuses("automatic tensor parallelism is not modelled", unless=lambda value: value == 1),
    **ignores(
        "torch-autocast.dtype gradient-clipping steps-per-print wall-clock-breakdown zero-allow-untested-optimizer fp16.loss-scale "
        "fp16.auto-cast "
        "fp16.loss-scale-window fp16.initial-scale-power fp16.hysteresis fp16.min-loss-scale zero-force-ds-cpu-optimizer "
        "optimizer.params.lr optimizer.params.betas optimizer.params.eps optimizer.params.weight-decay optimizer.params.torch-adam "
        "optimizer.params.adam-w-mode optimizer.params.warmup-min-lr optimizer.params.bias-correction scheduler.type prescale-gradients "
        "scheduler.params.warmup-min-lr scheduler.params.warmup-max-lr scheduler.params.warmup-num-steps "
        "scheduler.params.total-num-steps zero-optimization.allgather-partitions zero-optimization.allgather-bucket-size "
        "zero-optimization.reduce-scatter zero-optimization.round-robin-gradients zero-optimization.offload-optimizer.pin-memory "
        "zero-optimization.offload-param.pin-memory zero-optimization.offload-optimizer.nvme-path "
        "zero-optimization.offload-optimizer.fast-init zero-optimization.offload-optimizer.buffer-count "
        "zero-optimization.offload-param.nvme-path zero-optimization.offload-param.buffer-count "
        "zero-optimization.offload-param.buffer-size zero-optimization.offload-param.max-in-cpu "
        "zero-optimization.stage3-gather-16bit-weights-on-model-save aio.block-size aio.queue-depth aio.thread-count "
        "zero-optimization.stage3-gather-fp16-weights-on-model-save gradient-predivide-factor memory-breakdown "
        "aio.single-submit aio.overlap-events communication-data-type dump-state flops-profiler.enabled checkpoint.load-universal"
    ),
}  # fmt: skip


def finish(draft: Draft) -> None:
    """A config of DeepSpeed names no model and no length; "auto" is left to the trainer around it."""
    draft.facts["deepspeed"] = True
    if draft.plan.get("zero"):
        draft.plan["recipe"] = "mixed-16"
        if not (draft.facts.get("bf16") or draft.facts.get("fp16")):
            draft.assumed.append(
                "recipe mixed-16: bf16 or fp16 is not said to be on; DeepSpeed's ZeRO is modelled with 16-bit weights"
            )
    else:
        trainer.number_format(draft, "bf16" if draft.facts.get("bf16") else "fp32")
    _ranks_of_the_batch(draft)
    trainer.layout(draft)
    draft.assumed.append("seq 4096: a DeepSpeed config has no length; --seq says it to train")


def _ranks_of_the_batch(draft: Draft) -> None:
    """train_batch_size = micro-batch x accumulation x ranks: the one that is left out follows."""
    facts, micro = draft.facts, draft.plan.get("micro_batch")
    if not micro and "train_batch" in facts and "accumulation" in facts:
        size, rest = divmod(draft.whole("train_batch"), max(1, draft.whole("accumulation") * draft.whole("gpus")))
        if size >= 1 and not rest:
            draft.assume("micro_batch", size, "train_batch_size / (accumulation x ranks)")
        return
    if "gpus" in facts or "train_batch" not in facts or not micro or "accumulation" not in facts:
        return
    ranks, rest = divmod(draft.whole("train_batch"), max(1, micro * draft.whole("accumulation")))
    if ranks >= 1 and not rest:
        facts["gpus"] = ranks
        draft.assumed.append(f"dp {ranks}: train_batch_size / (micro-batch x accumulation)")


def write(writing: Writing) -> str:
    """The JSON of a plan that DeepSpeed's engine trains."""
    plan = writing.plan
    writing.only("implementation", "deepspeed", "hf")
    writing.only("recipe", "mixed-16")
    zero: dict[str, Any] = {"stage": writing.say("zero", 0)}
    for name in (*_SWITCHES, *_ENGINE):
        if (value := writing.say(name, None)) is not None:
            zero[name] = value
    device = "nvme" if writing.say("nvme", False) else "cpu"
    offload = writing.say("offload", "none")
    if offload != "none":
        zero["offload_optimizer"] = {"device": device}
    if offload == "parameters":
        zero["offload_param"] = {"device": device}
    for name in ("dp", "micro_batch", "global_batch"):
        writing.say(name, 1)
    made = {
        "train_batch_size": plan.batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.microbatches,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    optimizer = writing.say("optimizer", "adamw")
    made["optimizer"] = {"type": {"adamw": "AdamW", "lion": "Lion"}.get(optimizer, optimizer)}
    note_rest(writing)
    return json.dumps(made, indent=1)
