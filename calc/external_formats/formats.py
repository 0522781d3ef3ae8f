"""Which tool a text is of, reading it into a scenario, and writing one for a tool."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import PurePosixPath
from typing import Any, Final

from pydantic import BaseModel

from calc.commands import COMMANDS, command_line, flag
from calc.errors import InputError, validated
from calc.external_formats.documents import flattened, parse
from calc.external_formats.draft import Bad, Draft, Setting, named, states, take, whole
from calc.external_formats.draft import text as text_of
from calc.external_formats.models import resolve
from calc.external_formats.shell import CommandLine, commands, options
from calc.external_formats.writing import Writing


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool: the module that has its SETTINGS, `finish` and perhaps `write`, and the question that its runs are."""

    module: str
    command: str
    writes: bool = False


TOOLS: Final[Mapping[str, Tool]] = {
    "vllm": Tool("vllm", "serve", writes=True),
    "sglang": Tool("sglang", "serve"),
    "llama-server": Tool("llama_server", "serve", writes=True),
    "deepspeed": Tool("deepspeed", "train", writes=True),
    "trl": Tool("trl", "train", writes=True),
    "axolotl": Tool("axolotl", "train"),
    "llama-factory": Tool("llama_factory", "train"),
    "torchtitan": Tool("torchtitan", "train", writes=True),
    "megatron": Tool("megatron", "train", writes=True),
    "accelerate": Tool("accelerate", "train"),
}
WRITTEN: Final = tuple(name for name, tool in TOOLS.items() if tool.writes)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run as a question of this product."""

    tool: str
    command: str
    model: str
    plan: BaseModel
    understood: tuple[str, ...]
    not_understood: tuple[str, ...]
    assumed: tuple[str, ...]
    model_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def given(self) -> dict[str, Any]:
        """The plan's fields that the text gives a value."""
        data: dict[str, Any] = self.plan.model_dump(mode="json")
        return {name: data[name] for name in type(self.plan).model_fields if name in self.plan.model_fields_set}

    def command_line(self) -> str:
        """The equal command."""
        return command_line(COMMANDS[self.command], self.plan, self.model or "MODEL")

    def as_json(self) -> dict[str, Any]:
        made = {
            "tool": self.tool,
            "command": self.command,
            "model": self.model or None,
            "plan": self.given,
            "understood": list(self.understood),
            "not_understood": list(self.not_understood),
            "assumed": list(self.assumed),
            "command_line": self.command_line(),
        }
        return made | ({"model_config": dict(self.model_config)} if self.model_config else {})


def read(text: str, tool: str | None = None, gpus: int | None = None) -> Scenario:
    """The scenario of a command line or of a config file's text.

    `tool` is a name of TOOLS, None to find it out; `gpus` says how many GPUs where the text does not. InputError when the text is of
    no known tool, is none of that tool, or describes what the rules of a plan refuse.
    """
    if tool is not None and tool not in TOOLS:
        raise InputError.of("--as", tool, f"it must be one of {', '.join(TOOLS)}")
    if not text.strip():
        raise InputError("text: it is empty; give a command line or a config file", "text")
    line = None if text.lstrip()[:1] in ("{", "[") else _command(text, tool)
    if line:
        name, words, variables = line
        draft = _draft(name, gpus)
        _read_command(draft, words, variables)
        if re.search(r"(?m)^\s*(if|case|for|while)\b", text):
            draft.assumed.append("conditions and loops of the script are not evaluated: every branch is read")
    else:
        kind, data = parse(text)
        draft = _draft(tool or _tool_of(kind, data), gpus)
        take(draft, _module(draft.tool).SETTINGS, flattened(data, whole=frozenset({"deepspeed"})))
        if not draft.understood:
            raise InputError(f"text: nothing in it is a setting of {draft.tool}", "text")
    return _finished(draft)


def _draft(name: str, gpus: int | None) -> Draft:
    draft = Draft(name, TOOLS[name].command)
    if gpus is not None:
        draft.facts["gpus"] = gpus
    return draft


def _module(name: str) -> Any:
    return import_module(f"calc.external_formats.{TOOLS[name].module}")


def _finished(draft: Draft) -> Scenario:
    module = _module(draft.tool)
    module.finish(draft)
    resolve(draft)
    draft.assumed.append("GPU: the text names none; --gpu says it to the command")
    plan = validated(COMMANDS[draft.command].plan, draft.plan, flag)
    return Scenario(
        draft.tool,
        draft.command,
        draft.model,
        plan,
        tuple(draft.understood),
        tuple(draft.not_understood),
        tuple(draft.assumed),
        draft.facts.get("model_config", {}),
    )


# The sign of a tool's program in the words of a command. First come, first found.
_PROGRAMS: Final = (
    ("vllm", re.compile(r"(^|/)vllm$|^vllm\.entrypoints\.(openai\.)?api_server$")),
    ("sglang", re.compile(r"(^|/)sglang$|^(sglang|sglang_router)\.launch_server$")),
    ("llama-server", re.compile(r"(^|/)(llama-server|llama-cli|llama)(\.exe)?$")),
    ("llama-factory", re.compile(r"(^|/)llamafactory-cli$|(^|/)train_bash\.py$")),
    ("axolotl", re.compile(r"(^|/)axolotl$|^axolotl\.cli\.train$")),
    ("megatron", re.compile(r"(^|/)(pretrain_\w+|finetune_gpt|train_gpt)\.py$")),
    ("torchtitan", re.compile(r"(^|/)run_train\.sh$|^torchtitan\.train$|torchtitan/train\.py$")),
    ("trl", re.compile(r"(^|/)trl$|(^|/)((sft|dpo|grpo)(_\w+)?|run_clm|run_sft)\.py$|^trl\.scripts\.(sft|dpo|grpo)$")),
    ("accelerate", re.compile(r"(^|/)accelerate$")),
    ("deepspeed", re.compile(r"(^|/)deepspeed$")),
)


def _command(text: str, tool: str | None) -> tuple[str, list[str], dict[str, str]] | None:
    """The tool, the words and the variables of the last command of a known program; None where the text is no command line."""
    first = next((one for one in text.splitlines() if one.strip() and not one.lstrip().startswith("#")), text)
    if re.match(r"\s*(\[+[\w.-]+\]+|[\w.-]+)\s*(#.*)?$", first) or re.match(r"\s*[\w.-]+:(\s|$)", first):
        return None  # a section of TOML, or a key of YAML
    try:
        lines = commands(text)
    except InputError:
        if re.search(r"(?m)^\s*[\w.-]+\s*[:=]\s", text):
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
    for name, sign in _PROGRAMS:
        if any(sign.search(one) for one in line.words if not one.startswith("-")):
            return name
    return ""


_TORCHRUN: Final[Mapping[str, Setting]] = {
    **named("nproc-per-node nproc", states("gpus_per_node")),
    **named("nnodes", states("nodes")),
    **named("num-gpus", states("gpus_per_node")),
    **named("num-nodes", states("nodes")),
    **{
        name: Setting(lambda draft, value: "no effect here")
        for name in "node-rank master-addr master-port rdzv-id rdzv-backend rdzv-endpoint rdzv-conf max-restarts log-dir "
        "hostfile include exclude tee redirects local-ranks-filter role m module".split()
    },
    **{name: Setting(lambda draft, value: "no effect here", is_switch=True) for name in ("standalone", "no-python")},
}


def _read_command(draft: Draft, words: list[str], variables: Mapping[str, str]) -> None:
    """Launcher and tool, each with its own settings."""
    module = _module(draft.tool)
    start = _start(words)
    front, rest = words[: start + 1], words[start + 1 :]
    launcher = next(
        (index for index, one in enumerate(front[:-1]) if PurePosixPath(one).name in ("torchrun", "deepspeed")), None
    )
    if launcher is None and "torch.distributed.launch" in front:
        launcher = front.index("torch.distributed.launch")
    if launcher is not None:
        _take_options(draft, front[launcher + 1 : -1], _TORCHRUN, positional=False)
    elif "accelerate" in front and front[-1] != "accelerate":
        from calc.external_formats import accelerate

        begin = front.index("accelerate") + 1
        _take_options(draft, front[begin + (front[begin] == "launch") : -1], accelerate.LAUNCHER, positional=False)
    _environment(draft, variables)
    if draft.tool == "trl":
        from calc.external_formats.trl import objective_of

        if objective := objective_of(front + rest[:1]):
            if objective not in ("sft", "dpo", "grpo"):
                raise InputError.of(
                    "trl", objective, "it must be one of sft, dpo, grpo; other trainers are not modelled"
                )
            draft.plan["objective"] = objective
            draft.understood.append(f"{objective}: objective {objective}")
    if rest and PurePosixPath(front[-1]).name in (
        "vllm",
        "sglang",
        "trl",
        "llama",
        "llamafactory-cli",
        "axolotl",
        "accelerate",
    ):
        rest = rest[1:]  # serve, sft, train, launch
    table = {**module.SETTINGS, **_TORCHRUN} if draft.tool in ("megatron", "torchtitan") else module.SETTINGS
    if draft.tool == "accelerate":
        table = module.LAUNCHER
    elif draft.tool == "deepspeed":
        from calc.external_formats.trainer import TRAINING_ARGUMENTS

        table = {**_TORCHRUN, **TRAINING_ARGUMENTS}
    _take_options(draft, rest, table, positional=True)


def _start(words: list[str]) -> int:
    """The index of the tool's own program: what is before it belongs to launchers."""
    for _, sign in _PROGRAMS:
        for index, one in enumerate(words):
            if sign.search(one) and not one.startswith("-"):
                return index
    return 0


def _take_options(draft: Draft, words: list[str], table: Mapping[str, Setting], *, positional: bool) -> None:
    pairs = list(options(words, table))
    take(draft, table, [pair for pair in pairs if pair[0]])
    for name, _, word in pairs if positional else ():
        if not name:
            _bare(draft, word)


def _bare(draft: Draft, word: str) -> None:
    """A word that belongs to no option: the model of a server, else something that is not opened."""
    if "$" in word:
        draft.not_understood.append(f"{word}: a shell variable without a value here")
    elif draft.tool in ("vllm", "sglang") and not draft.model:
        try:
            draft.model = text_of(word)
        except Bad as bad:
            raise InputError.of("model", word, str(bad)) from None
        draft.understood.append(f"{word}: model {draft.model}")
    elif word.endswith((".yaml", ".yml", ".json", ".toml")):
        draft.not_understood.append(f"{word}: a file of its own, which is not opened; read it by itself")
    else:
        draft.not_understood.append(f"{word[:160]}: not a setting known here")


_VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def _environment(draft: Draft, variables: Mapping[str, str]) -> None:
    """GPUs that the environment states; other variables are named where they look like settings of the tool."""
    for name, value in variables.items():
        if name in _VARIABLES and value and "$" not in value and draft.command == "train":
            if not {"gpus", "gpus_per_node"} & set(draft.facts):
                draft.facts["gpus"] = len(value.split(","))
                draft.understood.append(f"{name}={value}: GPUs {draft.facts['gpus']}")
        elif name == "NGPU" and value.isdigit():
            draft.facts.setdefault("gpus", whole(value))
            draft.understood.append(f"NGPU={value}: GPUs {value}")
        elif re.match(r"VLLM_|SGLANG_|LLAMA_ARG_|PYTORCH_|NCCL_", name):
            draft.not_understood.append(f"{name}={value}: environment variables of the tool are not read")


def _tool_of(kind: str, data: Mapping[str, Any]) -> str:
    """The tool whose config file this is, by the keys that only it has. InputError where there is none."""
    keys = {str(key).replace("-", "_") for key in data}
    if "architectures" in keys or {"model_type", "hidden_size"} <= keys:
        raise InputError("text: this is a model's config; give it as MODEL to params, train or serve", "text")
    for name, kinds, signs in _SIGNS:
        if kind in kinds and keys & signs:
            return name
    raise InputError(f"text: no known tool's {kind.upper()} config; --as names the tool: {', '.join(TOOLS)}", "text")


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


def write(name: str, model: str, plan: BaseModel) -> tuple[str, tuple[str, ...]]:
    """The plan in a tool's own form, and notes on what cannot be said there. InputError for a plan that the tool cannot run."""
    if name not in WRITTEN:
        raise InputError.of("FORMAT", name, f"it must be one of {', '.join(WRITTEN)}")
    writing = Writing(name, model, plan)
    made: str = _module(name).write(writing)
    return made, tuple(writing.notes)
