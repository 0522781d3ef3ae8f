"""Which tool a command line or a config file is of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from calc.errors import InputError
from calc.external_formats.shell import CommandLine, commands

# The sign of a tool's program in the words of a command. First come, first found.
PROGRAMS: Final = (
    ("vllm", re.compile(r"(^|/)vllm$|(^|/)vllm-openai(:|$)|^vllm\.entrypoints\.(openai\.)?api_server$")),
    ("sglang", re.compile(r"(^|/)sglang$|^(sglang|sglang_router)\.launch_server$")),
    ("llama-server", re.compile(r"(^|/)(llama-server|llama-cli|llama)(\.exe)?$|(^|/)llama\.cpp:server")),
    ("llama-factory", re.compile(r"(^|/)llamafactory-cli$|(^|/)train_bash\.py$")),
    ("axolotl", re.compile(r"(^|/)axolotl$|^axolotl\.cli\.train$")),
    ("megatron", re.compile(r"(^|/)(pretrain_\w+|finetune_gpt|train_gpt)\.py$")),
    ("torchtitan", re.compile(r"(^|/)run_train\.sh$|^torchtitan\.train$|torchtitan/train\.py$")),
    ("trl", re.compile(r"(^|/)trl$|(^|/)((sft|dpo|grpo)(_\w+)?|run_clm|run_sft)\.py$|^trl\.scripts\.(sft|dpo|grpo)$")),
    ("accelerate", re.compile(r"(^|/)accelerate$")),
    ("deepspeed", re.compile(r"(^|/)deepspeed$")),
)


def command_of(text: str, tool: str | None) -> tuple[str, list[str], dict[str, str]] | None:
    """The tool, the words and the variables of the last command of a known program; None where the text is no command line."""
    first = next((one for one in text.splitlines() if one.strip() and not one.lstrip().startswith("#")), text)
    if re.match(r"\s*(\[+[\w.-]+\]+|[\w.-]+)\s*(#.*)?$", first) or re.match(r"\s*[\w.-]+:(\s|$)", first):
        return None  # a section of TOML, or a key of YAML
    try:
        lines = commands(text)
    except InputError:
        if re.search(r"(?m)^[ \t]*[\w.-]+[ \t]*[:=]\s", text):
            return None
        raise
    found = [(name, line) for line in lines if (name := _program(line))]
    if not found:
        return (tool, lines[-1].words, lines[-1].variables) if tool and lines and _has_option(lines[-1]) else None
    name, line = found[-1]
    return tool or name, line.words, line.variables


def _has_option(line: CommandLine) -> bool:
    return any(one.startswith("-") for one in line.words)


def _program(line: CommandLine) -> str:
    for name, sign in PROGRAMS:
        if any(sign.search(one) for one in line.words if not one.startswith("-")):
            return name
    return ""


def tool_of(kind: str, data: Mapping[str, Any], known: Iterable[str]) -> str:
    """The tool whose config file this is, by the keys that only it has. InputError where there is none."""
    keys = {str(key).replace("-", "_") for key in data}
    if "architectures" in keys or {"model_type", "hidden_size"} <= keys:
        raise InputError("text: this is a model's config; give it as MODEL to params, train or serve", "text")
    for name, kinds, signs in _SIGNS:
        if kind in kinds and keys & signs:
            return name
    raise InputError(f"text: no known tool's {kind.upper()} config; --as names the tool: {', '.join(known)}", "text")


_SIGNS: Final[Iterable[tuple[str, tuple[str, ...], set[str]]]] = (
    ("torchtitan", ("toml",), {"parallelism", "activation_checkpoint", "training", "job"}),
    (
        "deepspeed",
        ("json",),
        {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "zero_allow_untested_optimizer"},
    ),
    ("axolotl", ("yaml",), {"base_model", "sequence_len"}),
    ("llama-factory", ("yaml", "json"), {"finetuning_type", "stage", "cutoff_len", "template"}),
    ("accelerate", ("yaml", "json"), {"distributed_type", "compute_environment", "fsdp_config", "deepspeed_config"}),
    ("trl", ("yaml", "json"), {"model_name_or_path", "per_device_train_batch_size", "dataset_name"}),
    ("sglang", ("yaml",), {"model_path", "mem_fraction_static", "tp_size"}),
    ("vllm", ("yaml",), {"max_model_len", "gpu_memory_utilization", "model", "max_num_seqs", "max_num_batched_tokens"}),
    ("deepspeed", ("json",), {"bf16", "fp16", "optimizer"}),
)
