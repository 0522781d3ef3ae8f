"""axolotl's YAML (https://docs.axolotl.ai/docs/config-reference.html)."""

from __future__ import annotations

from typing import Any, Final

from calc.external_formats import accelerate, trainer
from calc.external_formats.draft import (
    NO_EFFECT,
    Draft,
    NotSaid,
    Setting,
    Table,
    ignores,
    is_model,
    named,
    number,
    refuses,
    sets,
    states,
    switches,
    truth,
    whole,
)  # fmt: skip
from calc.external_formats.draft import names as names_of


def _bf16(draft: Draft, value: Any) -> str:
    if value == "full":
        draft.facts["pure_bf16"] = True
        return "weights in bf16, no autocast"
    draft.facts["bf16"] = value == "auto" or truth(value)
    return f"autocast {'on' if draft.facts['bf16'] else 'off'}"


def _adapter(draft: Draft, value: Any) -> str:
    if value not in ("lora", "qlora"):
        raise NotSaid("this kind of adapter is not modelled")
    draft.facts["adapter"] = True
    if value == "qlora":
        draft.facts["bits"] = 4
    return f"method {value}"


def _fsdp(draft: Draft, value: Any) -> str:
    parts = names_of(value) if value else ()
    draft.facts["fsdp"] = bool(parts)
    draft.plan["zero"] = 2 if "shard_grad_op" in parts else 3 if parts else 0
    if "offload" in parts:
        draft.plan["offload"] = "parameters"
    return f"zero {draft.plan['zero']}"


def _config_of_fsdp(setting: Setting) -> Setting:
    def apply(draft: Draft, value: Any) -> str:
        draft.facts["fsdp"] = True
        draft.plan.setdefault("zero", 3)
        return setting.apply(draft, value)

    return Setting(apply)


def _checkpointing(draft: Draft, value: Any) -> str:
    if value in ("offload", "unsloth", "offload_disk"):
        draft.plan["recompute"], draft.plan["offload_activations"] = "full", True
        return "recompute full, offload_activations"
    return trainer.recompute(draft, value)


def _bits(bits: int) -> Setting:
    def apply(draft: Draft, value: Any) -> str:
        if truth(value):
            draft.facts["bits"] = bits
            return f"weights in {bits} bits"
        return NO_EFFECT

    return Setting(apply)


def _rl(draft: Draft, value: Any) -> str:
    if value not in ("dpo", "grpo"):
        raise NotSaid("this objective is not modelled")
    draft.plan["objective"] = value
    return f"objective {value}"


SETTINGS: Final[Table] = {
    "base-model": is_model(),
    "sequence-len": sets("seq"),
    "micro-batch-size": sets("micro_batch"),
    "gradient-accumulation-steps": states("accumulation"),
    "optimizer": Setting(trainer.optimizer),
    "bf16": Setting(_bf16),
    **named("fp16 float16", states("fp16", truth)),
    "bfloat16": Setting(lambda draft, value: _bf16(draft, "full") if truth(value) else NO_EFFECT),
    "gradient-checkpointing": Setting(_checkpointing),
    "activation-offloading": Setting(
        lambda draft, value: _checkpointing(draft, "offload") if value is True or value == "legacy" else NO_EFFECT
    ),
    "adapter": Setting(_adapter),
    "lora-r": sets("lora_rank"),
    "lora-dropout": sets("lora_dropout", number),
    "lora-target-modules": Setting(trainer.targets),
    "lora-target-linear": switches("lora_targets", ("all-linear",)),
    "lora-modules-to-save": sets("modules_to_save", names_of),
    "peft-use-dora": states("dora", truth),
    "load-in-4bit": _bits(4),
    "load-in-8bit": _bits(8),
    "flash-attention": switches("attention", "flash"),
    "sdp-attention": switches("attention", "sdpa"),
    "eager-attention": switches("attention", "eager"),
    "attn-implementation": sets("attention", trainer.attention),
    "fsdp": Setting(_fsdp),
    **{f"fsdp-config.{name}": _config_of_fsdp(setting) for name, setting in accelerate.FSDP.items()},
    "fsdp-version": Setting(lambda draft, value: NO_EFFECT),
    "deepspeed": Setting(trainer.deepspeed_file),
    "rl": Setting(_rl),
    **named("context-parallel-size sequence-parallel-degree", sets("cp", whole)),
    "tensor-parallel-size": sets("tp"),
    "dp-replicate-size": sets("dp_replicate"),
    "dp-shard-size": states("dp_shard"),
    **named("liger-fused-linear-cross-entropy", states("liger", truth)),
    **named("liger-rope liger-rms-norm liger-glu-activation liger-layer-norm", states("liger", truth)),
    "sample-packing": Setting(lambda draft, value: "every sequence has the length asked for"),
    "pad-to-sequence-len": Setting(lambda draft, value: "every sequence has the length asked for"),
    "unfrozen-parameters": refuses("training some of the weights is not modelled"),
    "relora-steps": refuses("ReLoRA is not modelled"),
    "plugins": refuses("what plug-ins change is not read; Liger's switches are read by themselves"),
    "torch-compile": refuses("torch.compile is not modelled in these trainers", unless=lambda value: value in (False, None)),
    **named("lora-mlp-kernel lora-qkv-kernel lora-o-kernel lora-embedding-kernel", refuses("its own kernels of adapters are not modelled")),
    **named("gptq", refuses("the format is read from the checkpoint")),
    **ignores(
        "datasets dataset-prepared-path val-set-size output-dir lora-alpha lora-model-dir wandb-project wandb-entity wandb-watch "
        "wandb-name wandb-log-model wandb-run-id num-epochs lr-scheduler learning-rate tf32 resume-from-checkpoint logging-steps "
        "loss-watchdog-threshold loss-watchdog-patience warmup-ratio warmup-steps evals-per-epoch saves-per-epoch weight-decay model-type "
        "tokenizer-type gradient-checkpointing-kwargs.use-reentrant strict is-llama-derived-model "
        "train-on-inputs group-by-length early-stopping-patience xformers-attention hub-model-id push-dataset-to-hub chat-template "
        "test-datasets shuffle-merged-datasets eval-sample-packing debug special-tokens special-tokens.pad-token special-tokens.bos-token "
        "special-tokens.eos-token special-tokens.unk-token save-safetensors max-steps save-steps eval-steps eval-table-size "
        "eval-max-new-tokens save-total-limit adam-beta1 adam-beta2 adam-epsilon max-grad-norm hub-strategy dataset-processes "
        "bnb-config-kwargs tokenizer-config trust-remote-code save-first-step cosine-min-lr-ratio local-rank base-model-config "
        "gradient-checkpointing-kwargs save-strategy use-tensorboard processor-type skip-prepare-dataset remove-unused-columns "
        "flash-attn-rms-norm flash-attn-cross-entropy flash-attn-fuse-qkv flash-attn-fuse-mlp lora-fan-in-fan-out tokens "
        "eot-tokens seed experimental-skip-move-to-device ddp-find-unused-parameters bnb-config-kwargs.bnb-4bit-quant-storage"
    ),
}  # fmt: skip


def finish(draft: Draft) -> None:
    """axolotl loads the weights in the format that bf16 names and runs them under autocast."""
    facts, plan = draft.facts, draft.plan
    draft.assume("objective", "sft", "axolotl finetunes unless rl says otherwise")
    draft.assume("seq", 512, "the default of sequence_len")
    draft.assume("micro_batch", 1, "micro_batch_size is left out")
    trainer.adapters(draft)
    half = facts.get("bf16") or facts.get("fp16")
    trainer.number_format(draft, "bf16" if half else "fp32")
    accelerate.ranks(draft)
    trainer.layout(draft)
    trainer.scored(draft)
    if facts.get("liger") and plan.get("implementation", "hf") == "hf":
        plan["implementation"] = "liger"
