"""The words of a command: launchers in front of the tool's program, then the tool's own options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from calc.errors import InputError
from calc.external_formats.detection import PROGRAMS
from calc.external_formats.draft import Bad, Draft, NotSaid, Setting, named, states, take, whole
from calc.external_formats.draft import text as text_of
from calc.external_formats.named_files import take_file
from calc.external_formats.shell import options

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


def read_command(draft: Draft, module: Any, words: list[str], variables: Mapping[str, str]) -> None:
    """Launcher and tool, each with its own settings. `module` is the tool's."""
    start = _start(words)
    front, rest = words[: start + 1], words[start + 1 :]
    _in_front(draft, front[:-1])
    launcher = next(
        (index for index, one in enumerate(front[:-1]) if PurePosixPath(one).name in ("torchrun", "deepspeed")), None
    )
    for module_name in ("torch.distributed.launch", "torch.distributed.run"):
        if launcher is None and module_name in front:
            launcher = front.index(module_name)
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
        from calc.external_formats.trl import SETTINGS

        table = {**_TORCHRUN, **SETTINGS}
    _take_options(draft, rest, table, positional=True)


_PLAIN: Final = {"python", "python3", "uv", "exec", "nohup", "torchrun", "deepspeed", "accelerate"}


def _in_front(draft: Draft, front: list[str]) -> None:
    """Name what stands before a launcher that is known, such as Docker or Slurm with their options."""
    end = next((index for index, one in enumerate(front) if PurePosixPath(one).name in _PLAIN), len(front))
    if front[:end]:
        draft.not_understood.append(f"{' '.join(front[:end])[:160]}: what starts the tool is not read")


def _start(words: list[str]) -> int:
    """The index of the tool's own program: what is before it belongs to launchers."""
    for _, sign in PROGRAMS:
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
    elif word.endswith(".py"):
        draft.not_understood.append(f"{word}: a script, which is not opened")
    elif word.endswith((".yaml", ".yml", ".json", ".toml")):
        _named_file(draft, word)
    else:
        draft.not_understood.append(f"{word[:160]}: not a setting known here")


def _named_file(draft: Draft, word: str) -> None:
    """A file of the tool's settings that stands alone (axolotl train FILE); named where it is not opened."""
    try:
        take_file(draft, word, _table_of(draft.tool), whole=frozenset({"deepspeed"}))
    except NotSaid as reason:
        draft.not_understood.append(f"{word}: {reason}")


def _table_of(tool: str) -> Mapping[str, Setting]:
    from calc.external_formats.formats import settings_of

    return settings_of(tool)


_VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def _environment(draft: Draft, variables: Mapping[str, str]) -> None:
    """GPUs that the environment states; other variables are named where they look like settings of the tool."""
    for name, value in variables.items():
        if name in _VARIABLES and value and "$" not in value and draft.command == "train":
            if not {"gpus", "gpus_per_node"} & set(draft.facts):
                draft.facts["gpus"] = len(value.split(","))
                draft.understood.append(f"{name}={value}: GPUs {draft.facts['gpus']}")
        elif name == "CONFIG_FILE" and draft.tool == "torchtitan":
            _named_file(draft, value)
        elif name == "NGPU" and value.isdigit():
            draft.facts.setdefault("gpus", whole(value))
            draft.understood.append(f"NGPU={value}: GPUs {value}")
        elif re.match(r"VLLM_|SGLANG_|LLAMA_ARG_|PYTORCH_|NCCL_", name):
            draft.not_understood.append(f"{name}={value}: environment variables of the tool are not read")
