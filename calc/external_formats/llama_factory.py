"""LLaMA-Factory: `llamafactory-cli train` and its YAML (https://llamafactory.readthedocs.io/en/latest/advanced/arguments.html)."""

from __future__ import annotations

from typing import Any, Final

from calc.external_formats import trainer
from calc.external_formats.draft import (
    Draft,
    NotSaid,
    Setting,
    Table,
    ignores,
    is_model,
    named,
    number,
    one_of,
    refuses,
    sets,
    states,
    switches,
    truth,
    whole,
)  # fmt: skip
from calc.external_formats.draft import names as names_of


def _stage(draft: Draft, value: Any) -> str:
    known = {"pt": "pretrain", "sft": "sft", "dpo": "dpo", "ppo": "ppo"}
    found = one_of(known, "this stage is not modelled")(value)
    if found == "ppo":
        raise NotSaid("this stage is not modelled")
    draft.plan["objective"] = found
    return f"objective {found}"


def _method(draft: Draft, value: Any) -> str:
    found = one_of({"full": False, "lora": True}, "this way of finetuning is not modelled")(value)
    draft.facts["adapter"] = found
    return f"method {'lora' if found else 'full'}"


def _bits(draft: Draft, value: Any) -> str:
    draft.facts["bits"] = whole(value)
    if draft.facts["bits"] not in (4, 8):
        raise NotSaid("only 4 bits are modelled")
    return f"weights in {draft.facts['bits']} bits"


_EXTRAS = "this optimizer is not modelled"
SETTINGS: Final[Table] = {
    **trainer.TRAINING_ARGUMENTS,
    "model-name-or-path": is_model(),
    "stage": Setting(_stage),
    "finetuning-type": Setting(_method),
    "cutoff-len": sets("seq"),
    "lora-rank": sets("lora_rank"),
    "lora-target": Setting(trainer.targets),
    "lora-dropout": sets("lora_dropout", number),
    "additional-target": sets("modules_to_save", names_of),
    "use-dora": states("dora", truth, is_switch=True),
    **named("quantization-bit", Setting(_bits)),
    "quantization-method": refuses("not a method known here", unless=lambda value: value in ("bnb", "bitsandbytes")),
    "double-quantization": switches("quantization", "nf4", "nf4-single"),
    "pure-bf16": states("pure_bf16", truth, is_switch=True),
    "enable-liger-kernel": states("liger", truth, is_switch=True),
    "flash-attn": Setting(
        lambda draft, value: "attention as by default" if value == "auto" else sets("attention", trainer.attention).apply(draft, value)
    ),
    "disable-gradient-checkpointing": Setting(
        lambda draft, value: trainer.recompute(draft, not truth(value)), is_switch=True
    ),
    **named("use-galore use-apollo use-badam use-adam-mini use-muon", refuses(_EXTRAS, is_switch=True, unless=lambda v: v is False)),
    "fp8": refuses("fp8 in transformers' trainer is not modelled", is_switch=True),
    "use-unsloth": refuses("Unsloth's kernels are not modelled", is_switch=True),
    **ignores(
        "dataset template max-samples plot-loss output-dir pref-beta pref-loss dataset-dir val-size eval-dataset lora-alpha "
        "adapter-name-or-path loraplus-lr-ratio rope-scaling media-dir image-max-pixels video-max-pixels ray-run-name "
        "ray-num-workers resources-per-worker placement-strategy ray-storage-path cache-dir tokenized-path packing "
        "quantization-device-map upcast-layernorm create-new-adapter neat-packing image-min-pixels"
    ),
    **ignores("streaming overwrite-cache use-fast-tokenizer enable-thinking freeze-vision-tower "
        "freeze-multi-modal-projector", is_switch=True),
}  # fmt: skip


def finish(draft: Draft) -> None:
    """LLaMA-Factory loads 16-bit weights; those that train whole become fp32, except under ZeRO-3, FSDP and pure_bf16
    (src/llamafactory/model/adapter.py). Gradient checkpointing is on unless it is disabled."""
    plan, facts = draft.plan, draft.facts
    draft.assume("recompute", "full", "gradient checkpointing is on unless disable_gradient_checkpointing")
    draft.assume("seq", 2048, "the default of cutoff_len")
    draft.assume("micro_batch", 8, "the default of per_device_train_batch_size")
    if "adapter" not in facts:
        facts["adapter"] = True
        draft.assumed.append("method lora: the default of finetuning_type")
    if facts["adapter"] and "lora_targets" not in plan:
        draft.assume("lora_targets", ("all-linear",), "the default of lora_target is all")
    trainer.adapters(draft)
    trainer.number_format(draft, "bf16" if facts["adapter"] else "fp32")
    if facts.get("liger"):
        plan["implementation"] = "liger"
    trainer.layout(draft)
    trainer.scored(draft)
