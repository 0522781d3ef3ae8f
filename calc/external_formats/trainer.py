"""transformers' TrainingArguments, which TRL, LLaMA-Factory and others share, and what follows from a trainer's settings together."""

from __future__ import annotations

from typing import Any, Final

from calc.external_formats.draft import Draft, Setting, ignores, named, one_of, refuses, sets, states, truth

OPTIMIZERS: Final = {
    "adamw_torch": ("adamw", "foreach"), "adamw_torch_fused": ("adamw", "fused"), "adamw_hf": ("adamw", "loop"),
    "adamw": ("adamw", "foreach"), "adamw_apex_fused": ("adamw", "fused"), "adafactor": ("adafactor", None), "sgd": ("sgd", None),
    "adamw_8bit": ("adamw-8bit", None), "adamw_bnb_8bit": ("adamw-8bit", None), "paged_adamw_32bit": ("paged-adamw", None),
    "paged_adamw": ("paged-adamw", None), "adamw_torch_4bit": ("adamw-4bit", None), "muon": ("muon", None), "adam": ("adamw", "foreach"),
    "fusedadam": ("adamw", "fused"), "lion": ("lion", None),
}  # fmt: skip
ATTENTION: Final = {
    "sdpa": "sdpa", "eager": "eager", "flash_attention_2": "flash", "flash_attention_3": "flash", "fa2": "flash", "disabled": "eager",
    "kernels-community/flash-attn2": "flash", "kernels-community/flash-attn3": "flash", "kernels-community/vllm-flash-attn3": "flash",
    "kernels-community/flash-attn": "flash", "flash": "flash",
}  # fmt: skip
attention = one_of(ATTENTION, "not an attention program known here")


def optimizer(draft: Draft, value: Any) -> str:
    """An optimizer of transformers by its name."""
    name, kernel = one_of(OPTIMIZERS, "this optimizer is not modelled")(value)
    draft.plan["optimizer"] = name
    if kernel and kernel != "foreach":
        draft.plan["optimizer_kernel"] = kernel
    return f"optimizer {name}"


def recompute(draft: Draft, value: Any) -> str:
    """Gradient checkpointing: whole layers."""
    draft.plan["recompute"] = "full" if truth(value) else "none"
    return f"recompute {draft.plan['recompute']}"


def targets(draft: Draft, value: Any) -> str:
    """Modules with adapters; `all` and `all-linear` are the same."""
    from calc.external_formats.draft import names

    found = names(value)
    draft.plan["lora_targets"] = ("all-linear",) if found in (("all",), ("all-linear",)) else found
    return f"lora_targets {','.join(draft.plan['lora_targets'])}"


# The configs that axolotl (deepspeed_configs/), LLaMA-Factory (examples/deepspeed/) and accelerate (deepspeed_config_templates/) ship,
# by name: ZeRO's stage, what is offloaded. accelerate's have fp16 on.
SHIPPED: Final = {
    "zero1.json": (1, ""), "zero2.json": (2, ""), "zero3.json": (3, ""), "zero3_bf16.json": (3, ""),
    "zero3_bf16_cpuoffload_params.json": (3, "parameters"), "zero3_bf16_cpuoffload_all.json": (3, "parameters"),
    "ds_z0_config.json": (0, ""), "ds_z2_config.json": (2, ""), "ds_z2_offload_config.json": (2, "optimizer"),
    "zero_stage1_config.json": (1, ""), "zero_stage2_config.json": (2, ""), "zero_stage2_offload_config.json": (2, "optimizer"),
    "zero_stage3_config.json": (3, ""), "zero_stage3_offload_config.json": (3, "parameters"),
    "ds_z3_config.json": (3, ""), "ds_z3_offload_config.json": (3, "parameters"),
}  # fmt: skip


def deepspeed_file(draft: Draft, value: Any) -> str:
    """A config of DeepSpeed in a file of its own, or in place."""
    from calc.external_formats import deepspeed
    from calc.external_formats.documents import flattened
    from calc.external_formats.draft import take
    from calc.external_formats.named_files import take_file

    name = str(value).rsplit("/", 1)[-1]
    if name in SHIPPED:
        stage, offload = SHIPPED[name]
        draft.plan["zero"], draft.facts["deepspeed"] = stage, True
        if name.startswith("zero_stage"):
            draft.facts["fp16"] = True
        if offload:
            draft.plan["offload"] = offload
        return (
            f"zero {stage}"
            + (f", offload {offload}" if offload else "")
            + ", by the name of a file that the tool ships"
        )
    if isinstance(value, dict):
        take(draft, deepspeed.SETTINGS, flattened(value))
        draft.facts["deepspeed"] = True
        return "DeepSpeed, as follows"
    draft.facts["deepspeed"] = True
    return take_file(draft, value, deepspeed.SETTINGS)


TRAINING_ARGUMENTS: Final = {
    **named("per-device-train-batch-size per-gpu-train-batch-size", sets("micro_batch")),
    "gradient-accumulation-steps": states("accumulation"),
    "gradient-checkpointing": Setting(recompute, is_switch=True),
    "bf16": states("bf16", truth, is_switch=True),
    "fp16": states("fp16", truth, is_switch=True),
    "optim": Setting(optimizer),
    "attn-implementation": sets("attention", attention),
    "deepspeed": Setting(deepspeed_file),
    "use-liger-kernel": states("liger", truth, is_switch=True),
    "num-processes": states("gpus"),
    **named("fsdp fsdp-config", refuses("give the accelerate config of FSDP by itself")),
    "auto-find-batch-size": refuses("the batch is the one given", is_switch=True, unless=lambda value: value == "false"),
    "group-by-length": refuses("every sequence has the length asked for", is_switch=True),
    "neftune-noise-alpha": refuses("the noise's copy of the embeddings is not counted"),
    **ignores(
        "output-dir logging-dir logging-steps logging-strategy save-steps save-strategy save-total-limit eval-steps eval-strategy "
        "evaluation-strategy per-device-eval-batch-size learning-rate lr-scheduler-type lr-scheduler-kwargs warmup-ratio warmup-steps "
        "weight-decay max-grad-norm adam-beta1 adam-beta2 adam-epsilon num-train-epochs max-steps seed data-seed report-to run-name "
        "push-to-hub-model-id hub-model-id hub-strategy hub-token dataset-name dataset-config dataset-train-split dataset-test-split "
        "dataset-num-proc dataset-text-field preprocessing-num-workers dataloader-num-workers ddp-timeout resume-from-checkpoint "
        "gradient-checkpointing-kwargs log-level chat-template-path eos-token metric-for-best-model load-best-model-at-end "
        "accelerator-config include-tokens-per-second torch-compile-mode eval-accumulation-steps model-revision trackio-space-id"
    ),
    **ignores(
        "trust-remote-code push-to-hub do-train do-eval tf32 remove-unused-columns overwrite-output-dir dataset-streaming bf16-full-eval "
        "ddp-find-unused-parameters logging-first-step log-completions logging-nan-inf-filter save-safetensors greater-is-better "
        "eval-on-start save-only-model dataloader-pin-memory dataloader-drop-last include-num-input-tokens-seen hub-private-repo",
        is_switch=True,
    ),
}  # fmt: skip


def number_format(draft: Draft, loaded: str) -> None:
    """The recipe of a trainer whose weights are loaded in `loaded` (fp32 or bf16), before the layout is known."""
    if draft.facts.get("fp16") and not draft.facts.get("bf16"):
        draft.not_understood.append("fp16: autocast in float16 is taken as bf16's, whose bytes are the same")
    half = draft.facts.get("bf16") or draft.facts.get("fp16")
    if draft.facts.get("pure_bf16"):
        draft.plan["recipe"] = "pure-bf16"
    elif loaded == "fp32":
        draft.plan["recipe"] = "amp" if half else "fp32"
    else:
        draft.plan["recipe"] = "bf16-autocast" if half else "pure-bf16"


def layout(draft: Draft) -> None:
    """Ranks, ZeRO and the global batch, once every setting is read."""
    plan, facts = draft.plan, draft.facts
    if "gpus" in facts or "nodes" in facts or "gpus_per_node" in facts:
        gpus = draft.whole("gpus", draft.whole("nodes") * draft.whole("gpus_per_node"))
    else:
        gpus = 1
        draft.assumed.append("dp 1: the text does not say how many GPUs; --gpus says it")
    inner = plan.get("tp", 1) * plan.get("cp", 1) * plan.get("pp", 1)
    if gpus % inner == 0 and gpus >= inner:
        plan["dp"] = gpus // inner
    else:
        draft.not_understood.append(f"GPUs {gpus}: not a multiple of tp x pp x cp ({inner}); dp is taken as 1")
        plan["dp"] = 1
    if facts.get("deepspeed"):
        _deepspeed(draft)
    elif facts.get("ddp_only"):
        plan["zero"] = 0
    if plan.get("zero") and plan["dp"] * plan.get("cp", 1) > 1 and facts.get("fsdp"):
        _fsdp(draft)
    if "accumulation" in facts:
        plan["global_batch"] = plan.get("micro_batch", 1) * draft.whole("accumulation") * plan["dp"]
    elif "train_batch" in facts:
        plan["global_batch"] = draft.whole("train_batch")


def _fsdp(draft: Draft) -> None:
    """accelerate makes trained weights fp32 before FSDP shards them in mixed precision (accelerator.py and fsdp_utils.py: upcast)."""
    if draft.plan.get("recipe") in ("amp", "bf16-autocast") and draft.plan.get("method", "full") == "full":
        draft.plan["recipe"] = "fsdp-bf16"


def _deepspeed(draft: Draft) -> None:
    """DeepSpeed's engine keeps fp32 shards of 16-bit weights, whatever the trainer's autocast."""
    plan = draft.plan
    if plan.get("zero", 0) and plan.get("recipe", "amp") != "fp32":
        if plan.get("recipe") != "mixed-16":
            draft.assumed.append("recipe mixed-16: DeepSpeed's engine keeps fp32 shards of 16-bit weights")
        plan["recipe"], plan["implementation"] = "mixed-16", "deepspeed"
        if plan.get("optimizer", "adamw") == "adamw":
            plan.pop("optimizer_kernel", None)


def adapters(draft: Draft) -> None:
    """The method, from the settings of peft and of bitsandbytes."""
    facts, plan = draft.facts, draft.plan
    if facts.get("adapter"):
        if "gptq" in draft.model.lower():
            plan["method"], plan["quantization"] = "qlora", "gptq-int4"
            draft.assumed.append(
                "method qlora, quantization gptq-int4: the model's name says that its weights are GPTQ's"
            )
            return
        plan["method"] = "qlora" if facts.get("bits") == 4 else "dora" if facts.get("dora") else "lora"
        if facts.get("bits") == 8:
            draft.not_understood.append("weights in 8 bits under adapters are not modelled: they are taken in 16")
    else:
        for name in ("lora_rank", "lora_targets", "lora_dropout", "modules_to_save"):
            if plan.pop(name, None) is not None:
                draft.not_understood.append(f"{name}: the run trains no adapters")


def scored(draft: Draft) -> None:
    """DPO and GRPO are modelled in 16-bit weights on data-parallel ranks."""
    if draft.plan.get("objective") in ("dpo", "grpo"):
        draft.plan["recipe"] = "pure-bf16"
        draft.assumed.append(f"recipe pure-bf16: {draft.plan['objective']} is modelled in it alone")
