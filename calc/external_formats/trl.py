"""TRL: `trl sft|dpo|grpo`, its scripts, its YAML (https://huggingface.co/docs/trl/clis)."""

from __future__ import annotations

import re
from typing import Any, Final

from calc.external_formats import accelerate, trainer
from calc.external_formats.draft import (
    NO_EFFECT,
    Draft,
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
    text,
    truth,
    whole,
)  # fmt: skip
from calc.external_formats.draft import names as names_of
from calc.external_formats.named_files import take_file
from calc.external_formats.writing import Writing, left_over

_DTYPES: Final = {
    "float32": "fp32", "bfloat16": "bf16", "float16": "bf16", "auto": "bf16",
}  # fmt: skip


def _launched_with(draft: Draft, value: Any) -> str:
    """TRL's own accelerate configs, by name."""
    name = text(value)
    stages = {"zero1": 1, "zero2": 2, "zero3": 3}
    if name in stages:
        draft.plan["zero"], draft.facts["deepspeed"] = stages[name], True
        return f"zero {stages[name]}, DeepSpeed"
    if name in ("fsdp1", "fsdp2"):
        draft.plan["zero"], draft.facts["fsdp"] = 3, True
        return "zero 3"
    if name in ("single_gpu", "multi_gpu"):
        return "zero 0"
    from calc.external_formats import accelerate

    return take_file(draft, value, accelerate.SETTINGS)


def _config(draft: Draft, value: Any) -> str:
    return take_file(draft, value, SETTINGS)


def _generations(draft: Draft, value: Any) -> str:
    draft.facts["generations"] = whole(value)
    return "a batch of whole groups"


def _beta(draft: Draft, value: Any) -> str:
    if draft.plan.get("objective") == "grpo":
        draft.plan["reference"] = number(value) > 0
        return f"reference {draft.plan['reference']}"
    return NO_EFFECT


SETTINGS: Final[Table] = {
    **trainer.TRAINING_ARGUMENTS,
    "model-name-or-path": is_model(),
    **named("max-length max-seq-length block-size", sets("seq")),
    "max-prompt-length": states("prompt"),
    "max-completion-length": states("completion"),
    **named("dtype torch-dtype", states("dtype", one_of(_DTYPES, "not a number format known here"))),
    "use-peft": states("adapter", truth, is_switch=True),
    **named("lora-r", sets("lora_rank")),
    "lora-target-modules": Setting(trainer.targets),
    "lora-dropout": sets("lora_dropout", number),
    "lora-modules-to-save": sets("modules_to_save", names_of),
    "use-dora": states("dora", truth, is_switch=True),
    "load-in-4bit": Setting(lambda draft, value: draft.facts.update(bits=4 if truth(value) else 16) or "method qlora", is_switch=True),
    "load-in-8bit": Setting(lambda draft, value: draft.facts.update(bits=8 if truth(value) else 16) or "weights in 8 bits", is_switch=True),
    "bnb-4bit-quant-type": sets("quantization", one_of({"nf4": "nf4", "fp4": "fp4"}, "not a 4-bit format known here")),
    "use-bnb-nested-quant": switches("quantization", "nf4", "nf4-single"),
    "accelerate-config": Setting(_launched_with),
    "beta": Setting(_beta),
    "num-generations": Setting(_generations),
    "activation-offloading": switches("offload_activations"),
    "packing": Setting(lambda draft, value: "every sequence has the length asked for", is_switch=True),
    "padding-free": refuses("every sequence has the length asked for", is_switch=True),
    "use-vllm": refuses("vLLM's share of the memory is not counted", is_switch=True),
    "vllm-mode": refuses("vLLM's share of the memory is not counted"),
    "vllm-gpu-memory-utilization": refuses("vLLM's share of the memory is not counted"),
    "precompute-ref-log-probs": Setting(
        lambda draft, value: draft.plan.update(reference=False) or "reference False" if truth(value) else NO_EFFECT, is_switch=True
    ),
    "loss-type": refuses("the loss of the objective is TRL's default"),
    "assistant-only-loss": Setting(lambda draft, value: NO_EFFECT, is_switch=True),
    "config": Setting(_config),
    **ignores(
        "lora-alpha lora-task-type reward-funcs temperature top-p top-k eos-token pad-token label-smoothing dataset-kwargs "
        "max-grad-norm epsilon epsilon-high scale-rewards reward-weights num-iterations vllm-server-host vllm-server-port "
        "dataset-prompt-column completion-only-loss bnb-4bit-compute-dtype bnb-4bit-quant-storage steps-per-generation"
    ),
    **ignores("use-rslora no-remove-unused-columns mask-truncated-completions log-unique-prompts ignore-bias-buffers", is_switch=True),
}  # fmt: skip


_SCRIPT: Final = re.compile(r"(?:^|[/.])(sft|dpo|grpo)(?:_\w+)?(?:\.py)?$")


def objective_of(words: list[str]) -> str | None:
    """What a TRL command trains: the word after `trl`, or the name of its script."""
    for index, one in enumerate(words[:-1]):
        if one.rsplit("/", 1)[-1] == "trl":
            return words[index + 1]
    return next((found[1] for one in words if not one.startswith("-") and (found := _SCRIPT.search(one))), None)


def finish(draft: Draft) -> None:
    """TRL 1.0: weights load in fp32 unless --dtype says otherwise, bf16 autocast and gradient checkpointing are on."""
    plan, facts = draft.plan, draft.facts
    if "objective" not in plan:
        draft.assume("objective", "sft", "the text does not say which trainer reads it")
    facts.setdefault("bf16", not facts.get("fp16"))
    draft.assume("recompute", "full", "TRL's trainers have gradient_checkpointing on")
    draft.assume("micro_batch", 8, "the default of per_device_train_batch_size")
    if plan["objective"] == "grpo":
        prompt, completion = draft.whole("prompt", 512), draft.whole("completion", 512)
        plan["seq"], plan["prompt_tokens"] = prompt + completion, prompt
        draft.assumed.append(
            f"seq {prompt + completion}: prompts of {prompt} and completions of {completion} tokens, all at their limit"
        )
    else:
        draft.assume("seq", 1024, "the default of max_length")
        if facts.get("prompt") and plan["objective"] == "dpo":
            plan["prompt_tokens"] = draft.whole("prompt")
    if facts.get("adapter"):
        draft.assume("lora_rank", 16, "the default of lora_r")
        draft.assume("lora_dropout", 0.05, "the default of lora_dropout")
    trainer.adapters(draft)
    loaded = facts.get("dtype", "bf16" if plan.get("method") == "qlora" else "fp32")
    trainer.number_format(draft, loaded)
    if facts.get("liger"):
        plan["implementation"] = "liger"
    accelerate.ranks(draft)
    trainer.layout(draft)
    trainer.scored(draft)


_OPTIMIZER: Final = {
    "adamw": "adamw_torch",
    "adamw-8bit": "adamw_8bit",
    "adamw-4bit": "adamw_torch_4bit",
    "paged-adamw": "paged_adamw_32bit",
}
_LAYOUT: Final = {
    (0, False): "multi_gpu",
    (3, False): "fsdp2",
    (1, True): "zero1",
    (2, True): "zero2",
    (3, True): "zero3",
}


def write(writing: Writing) -> str:
    """The `trl` command of a plan."""
    plan = writing.plan
    writing.only("implementation", "hf", "liger", "deepspeed")
    objective = writing.say("objective", "pretrain")
    words = ["trl", "sft" if objective == "pretrain" else objective, "--model_name_or_path", writing.hub_id]
    if objective == "grpo":
        prompt = writing.say("prompt_tokens", 1)
        words += ["--max_prompt_length", str(prompt), "--max_completion_length", str(plan.seq - prompt)]
        words += ["--beta", "0.04"] if writing.say("reference", False) else []
    else:
        words += ["--max_length", str(plan.seq)]
        if objective == "dpo" and writing.say("prompt_tokens", 1) > 1:
            words += ["--max_prompt_length", str(plan.prompt_tokens)]
    words += [
        "--per_device_train_batch_size",
        str(plan.micro_batch),
        "--gradient_accumulation_steps",
        str(plan.microbatches),
    ]
    words += ["--gradient_checkpointing", "true" if plan.recompute == "full" else "false"]
    for name in ("seq", "micro_batch", "global_batch", "recompute", "dp", "zero"):
        writing.say(name, None)
    words += [*_formats(writing), *_adapter(writing), *_layout_words(writing)]
    attention = writing.say("attention", "sdpa")
    words += (
        ["--attn_implementation", {"flash": "flash_attention_2"}.get(attention, attention)]
        if attention != "sdpa"
        else []
    )
    if plan.implementation == "liger":
        words += ["--use_liger_kernel", "true"]
    if writing.say("offload_activations", False):
        words += ["--activation_offloading", "true"]
    return left_over(writing, words)


def _formats(writing: Writing) -> list[str]:
    plan, recipe = writing.plan, writing.say("recipe", "pure-bf16")
    optimizer, kernel = writing.say("optimizer", "adamw"), writing.say("optimizer_kernel", "foreach")
    if optimizer == "adamw" and kernel == "fused":
        words = ["--optim", "adamw_torch_fused"]
    else:
        words = ["--optim", _OPTIMIZER.get(optimizer, optimizer)]
    if plan.scores or plan.implementation == "deepspeed":
        return words
    loads = {"amp": ("float32", True), "fsdp-bf16": ("float32", True), "fp32": ("float32", False), "bf16-autocast": ("bfloat16", True),
             "pure-bf16": ("bfloat16", False)}  # fmt: skip
    if recipe not in loads:
        return [*words, *writing.unsaid("recipe", "its trainers do not have it")]
    dtype, autocast = loads[recipe]
    return [*words, "--dtype", dtype, "--bf16", "true" if autocast else "false"]


def _adapter(writing: Writing) -> list[str]:
    method = writing.say("method", "full")
    if method == "full":
        return []
    words = ["--use_peft", "--lora_r", str(writing.say("lora_rank", 8))]
    if targets := writing.say("lora_targets", ()):
        words += ["--lora_target_modules", ",".join(targets)]
    words += ["--lora_dropout", f"{writing.say('lora_dropout', 0.0):g}"]
    words += ["--use_dora"] if method == "dora" else ["--load_in_4bit"] if method == "qlora" else []
    return words


def _layout_words(writing: Writing) -> list[str]:
    plan = writing.plan
    gpus = plan.dp
    words = ["--num_processes", str(gpus)] if gpus > 1 else []
    name = _LAYOUT.get((plan.zero, plan.implementation == "deepspeed"))
    if name is None:
        return [*words, *writing.unsaid("zero", "its accelerate configs do not have it")]
    return [*words, "--accelerate_config", name] if gpus > 1 else words
