"""llama.cpp's `llama-server` (https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md)."""

from __future__ import annotations

import re
from typing import Any, Final, get_args

from calc.external_formats.draft import (
    NO_EFFECT,
    Draft,
    NotSaid,
    Setting,
    ignores,
    named,
    one_of,
    refuses,
    sets,
    states,
    text,
    truth,
    whole,
)  # fmt: skip
from calc.external_formats.writing import Writing, left_over
from calc.serving.plan import WeightName

_KV: Final = {
    "f32": "fp32", "f16": "fp16", "bf16": "bf16", "q8_0": "q8_0", "q4_0": "q4_0", "q4_1": "q4_1", "q5_0": "q5_0", "q5_1": "q5_1",
}  # fmt: skip
_WEIGHTS: Final = {
    name.removeprefix("gguf-").lower(): name for name in get_args(WeightName) if name.startswith("gguf-")
} | {"mxfp4": "gguf-MXFP4_MOE"}
_QUANT: Final = re.compile(
    r"(?<![A-Za-z0-9])(I?Q\d\w*|F16|BF16|MXFP4)(?=\.gguf$|-\d{5}-of-\d{5}|$|[-.])", re.IGNORECASE
)


def _model(draft: Draft, value: Any) -> str:
    name, _, quant = text(value).partition(":")
    draft.model = name
    if quant:
        draft.facts["quant"] = quant
    elif found := _QUANT.search(name):
        draft.facts["quant"] = found[1]
    return f"model {name}" + (f", weights {draft.facts['quant']}" if "quant" in draft.facts else "")


def _file(draft: Draft, value: Any) -> str:
    found = _QUANT.search(text(value))
    if not found:
        raise NotSaid("the file's name tells no quantisation")
    draft.facts["quant"] = found[1]
    return f"weights {found[1]}"


def _context(draft: Draft, value: Any) -> str:
    size = whole(value)
    if size == 0:
        raise NotSaid("0 takes the model's own context; give --context")
    draft.facts["context"] = size
    return f"cache of {size} tokens over all slots"


def _layers(draft: Draft, value: Any) -> str:
    if value in ("all", "auto"):
        draft.plan["gpu_layers"] = None if value == "all" else "auto"
    else:
        layers = whole(value)
        draft.plan["gpu_layers"] = None if layers >= 99 or layers < 0 else layers
    layers_shown = draft.plan["gpu_layers"]
    return f"gpu_layers {'all' if layers_shown is None else layers_shown}"


def _flash(draft: Draft, value: Any) -> str:
    if str(value) in ("auto", "-1"):
        return NO_EFFECT
    draft.plan["flash_attention"] = truth(value)
    return f"flash_attention {draft.plan['flash_attention']}"


def _split(draft: Draft, value: Any) -> str:
    shares = text(value).replace("/", ",")
    draft.plan["tensor_split"] = shares
    draft.plan["pp"] = shares.count(",") + 1
    return f"tensor_split {shares}, pp {draft.plan['pp']}"


def _unified(draft: Draft, value: Any) -> str:
    draft.plan["kv_unified"] = truth(value)
    return f"kv_unified {draft.plan['kv_unified']}"


def _all_experts(draft: Draft, value: Any) -> str:
    if not truth(value):
        return NO_EFFECT
    draft.plan["n_cpu_moe"] = _ALL_LAYERS
    return "experts of all layers on the host"


_ALL_LAYERS: Final = 10_000
_MOVED: Final = (
    "tensors moved by name are modelled where they are the experts of all or of the first layers, to the CPU"
)
_EXPERTS: Final = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_OTHERS: Final = (
    *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "attn_kv_a_mqa", "ssm_in"),
    *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down", "ffn_gate_inp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
)
_LAYERS_TRIED: Final = 200
_CHARACTERS: Final = re.compile(r"[\w.\\|()\[\]*+?^$-]{1,120}")


def _is_quick(pattern: str) -> bool:
    """Whether a search of a short name for it takes little time: at most three repeats, none of a group, no back reference."""
    repeats = sum(map(pattern.count, "*+?"))
    return bool(_CHARACTERS.fullmatch(pattern)) and repeats <= 3 and not re.search(r"\)[*+?]|\\\d", pattern)


def _moved(draft: Draft, value: Any) -> str:
    """PATTERN=CPU, searched for in each tensor's name (common/arg.cpp; src/llama-model-loader.cpp): the experts of the first layers."""
    pattern, _, place = text(value).rpartition("=")
    if place.upper() != "CPU" or not _is_quick(pattern):
        raise NotSaid(_MOVED)
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise NotSaid(f"not a pattern: {error}") from error
    moved = [
        {name for name in (*_EXPERTS, *_OTHERS) if search(f"blk.{layer}.{name}.weight")}
        for layer in range(_LAYERS_TRIED)
    ]
    first = next((layer for layer, names in enumerate(moved) if not names), _LAYERS_TRIED)
    others = ("token_embd.weight", "output.weight", "output_norm.weight")
    if (
        not first
        or any(moved[first:])
        or any(names != set(_EXPERTS) for names in moved[:first])
        or any(map(search, others))
    ):
        raise NotSaid(_MOVED)
    draft.plan["n_cpu_moe"] = _ALL_LAYERS if first == _LAYERS_TRIED else first
    return f"experts of {'all' if first == _LAYERS_TRIED else f'the first {first}'} layers on the host"


_cache = one_of(_KV, "not a cache format here")
_DEVICES = "of several GPUs only shares of the layers are modelled for llama.cpp"
SETTINGS: Final = {
    **named("m model hf hfr hf-repo", Setting(_model)),
    **named("hff hf-file", Setting(_file)),
    **named("c ctx-size", Setting(_context)),
    **named("np parallel", states("slots")),
    **named("ub ubatch-size", sets("ubatch")),
    **named("b batch-size", sets("max_batched_tokens")),
    **named("ngl gpu-layers n-gpu-layers", Setting(_layers)),
    **named("fa flash-attn", Setting(_flash, is_switch=True)),
    **named("ctk cache-type-k", states("cache_k", _cache)),
    **named("ctv cache-type-v", states("cache_v", _cache)),
    **named("n predict n-predict", sets("output")),
    **named("kvu kv-unified", Setting(_unified, is_switch=True)),
    **named("sm split-mode", refuses(_DEVICES, unless=lambda value: value in ("none", "layer"))),
    **named("ts tensor-split", Setting(_split)),
    "rpc": refuses(_DEVICES),
    **named("ot override-tensor", Setting(_moved)),
    **named("cmoe cpu-moe", Setting(_all_experts, is_switch=True)),
    **named("ncmoe n-cpu-moe", sets("n_cpu_moe")),
    "swa-full": refuses("window caches are counted at their own size", is_switch=True),
    **named("nkvo no-kv-offload", refuses("a cache in host memory is not modelled", is_switch=True)),
    **named("md model-draft hfd hf-repo-draft", refuses("the draft's own weights and cache are not counted")),
    **named("draft draft-n draft-max", sets("draft_tokens")),
    **named("mm mmproj mmu mmproj-url", refuses("the projector of pictures is not counted")),
    **named("lora lora-scaled", refuses("adapters are not counted")),
    **named("fit fitt fitc", refuses("what is left out keeps its default; nothing is fitted")),
    "rope-scaling": refuses("the config is read as the file has it"),
    **named("embedding embeddings rerank reranking", refuses("only generation is modelled", is_switch=True)),
    **ignores(
        "host port a alias api-key t threads tb threads-batch chat-template chat-template-file temp temperature top-k top-p min-p "
        "s seed prio poll numa cache-reuse dt defrag-thold draft-min draft-p-min ngld gpu-layers-draft lv log-file mg main-gpu "
        "slot-save-path timeout to threads-http keep repeat-penalty presence-penalty frequency-penalty dev device lm load-mode "
        "hft hf-token reasoning-format reasoning-budget cram cache-ram ctxcp ctx-checkpoints chat-template-kwargs samplers path "
        "rope-scale rope-freq-base rope-freq-scale yarn-orig-ctx repeat-last-n"
    ),
    **ignores(
        "jinja no-mmap mlock mmap no-webui v verbose metrics slots cont-batching cb no-cont-batching no-warmup log-disable props "
        "no-context-shift context-shift offline no-jinja no-slots repack no-mmproj ignore-eos e escape",
        is_switch=True,
    ),
}  # fmt: skip


def finish(draft: Draft) -> None:
    """The context of a slot, the cache's format, and the file's quantisation."""
    plan = draft.plan
    plan["engine"] = "llama.cpp"
    slots = max(1, draft.whole("slots"))
    plan["concurrency"] = slots
    if "context" in draft.facts:
        plan["context"] = max(1, draft.whole("context") // (1 if plan.get("kv_unified") else slots))
    else:
        draft.assume(
            "context", 4096, "-c is left out, so that the server takes what the model has and the memory allows"
        )
    if plan.get("output", 0) <= 0:
        plan.pop("output", None)
    keys, values = draft.facts.get("cache_k", "fp16"), draft.facts.get("cache_v", "fp16")
    plan["kv_dtype"] = keys
    if keys != values:
        plan["cache_type_v"] = values
    if plan.get("n_cpu_moe") == 0:
        del plan["n_cpu_moe"]
    quant = str(draft.facts.get("quant", "")).lower()
    if quant in _WEIGHTS:
        plan["weights"] = _WEIGHTS[quant]
    elif quant:
        draft.not_understood.append(f"weights {quant}: not a GGUF type here; a .gguf file is read as it stores them")
    elif not draft.model.endswith(".gguf"):
        draft.assume("weights", "gguf-Q4_K_M", "llama-server's default for a repository that names none")
    if "gpu_layers" in plan and plan["gpu_layers"] is None:
        del plan["gpu_layers"]


def write(writing: Writing) -> str:
    """The `llama-server` command of a plan. Its -c is the context of all slots together."""
    plan = writing.plan
    writing.only("engine", "llama.cpp", "logical")
    words = ["llama-server"]
    weights = writing.say("weights", "auto")
    quant = weights.removeprefix("gguf-") if weights.startswith("gguf-") else ""
    if weights != "auto" and not quant:
        writing.unsaid("weights", "llama.cpp has GGUF's types")
    is_file = writing.model.endswith(".gguf")
    words += ["-m" if is_file else "-hf", writing.hub_id + (f":{quant}" if quant and not is_file else "")]
    if quant and is_file and quant.lower() not in writing.model.lower():
        writing.unsaid("weights", "the file has the type that it has")
    if not is_file and "gguf" not in writing.hub_id.lower():
        writing.notes.append(f"MODEL {writing.model}: name a GGUF file or repository of it in its place")
    slots, context = writing.say("concurrency", 1), writing.say("context", 4096)
    unified = writing.say("kv_unified", False)
    words += ["-c", str(context if unified else context * slots), "-np", str(slots), *(["-kvu"] if unified else [])]
    for name, option in (("tensor_split", "-ts"), ("n_cpu_moe", "-ncmoe")):
        if value := writing.say(name, None):
            words += [option, str(value)]
    if plan.tensor_split:
        writing.say("pp", 1)
    if plan.ubatch != 512:
        words += ["-ub", str(plan.ubatch)]
    layers = writing.say("gpu_layers", "all")
    words += ["-ngl", str(layers)]
    writing.say("ubatch", 512)
    if not writing.say("flash_attention", True):
        words += ["-fa", "off"]
    for name, option in (("max_batched_tokens", "-b"), ("output", "-n"), ("draft_tokens", "--draft-max")):
        if value := writing.say(name, 0):
            words += [option, str(value)]
    names = {value: key for key, value in _KV.items()} | {"auto": "f16"}
    cache = writing.say("kv_dtype", "auto")
    if cache in names:
        types = [writing.say(name, None) or cache for name in ("cache_type_k", "cache_type_v")]
        for option, kept in zip(("-ctk", "-ctv"), types, strict=True):
            words += [option, names.get(kept, kept)] if kept not in ("auto", "fp16") else []
    else:
        writing.unsaid("kv_dtype", "llama.cpp has no such cache")
    return left_over(writing, words)
