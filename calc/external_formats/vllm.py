"""vLLM: `vllm serve` and its YAML config (https://docs.vllm.ai/en/latest/cli/serve.html)."""

from __future__ import annotations

import json
from typing import Any, Final

from calc.external_formats.draft import (
    NO_EFFECT,
    Draft,
    NotSaid,
    Setting,
    Table,
    adapters,
    ignores,
    is_model,
    named,
    number,
    one_of,
    refuses,
    scaled,
    sets,
    states,
    switches,
    truth,
)  # fmt: skip
from calc.external_formats.named_files import take_file
from calc.external_formats.writing import Writing, flags, left_over

WEIGHTS: Final = {
    "fp8": "fp8", "awq": "awq-int4", "awq_marlin": "awq-int4", "gptq": "gptq-int4", "gptq_marlin": "gptq-int4",
    "bitsandbytes": "nf4", "mxfp4": "mxfp4", "gpt_oss_mxfp4": "mxfp4", "modelopt_fp4": "nvfp4", "modelopt": "fp8",
}  # fmt: skip
DTYPES: Final = {
    "auto": "auto", "bfloat16": "bf16", "bf16": "bf16", "half": "fp16", "float16": "fp16", "float": "fp32", "float32": "fp32",
}  # fmt: skip
KV: Final = {
    "auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16",
    "fp8_inc": "fp8", "fp8_ds_mla": "fp8",
}  # fmt: skip


def _quantised(draft: Draft, value: Any) -> str:
    draft.plan["weights"] = one_of(WEIGHTS, "this quantisation is not a format here; the checkpoint's own is read")(
        value
    )
    return f"weights {draft.plan['weights']}"


def _dtype(draft: Draft, value: Any) -> str:
    found = one_of(DTYPES, "not a number format known here")(value)
    if found != "auto":
        draft.facts["dtype"] = found
    return NO_EFFECT if found == "auto" else f"weights {found}, where they are not quantised"


def speculation(draft: Draft, value: Any) -> str:
    """`--speculative-config` is JSON; tokens drafted a step is what counts here."""
    try:
        given = json.loads(value) if isinstance(value, str) else value
        drafted = given["num_speculative_tokens"]
        if not isinstance(drafted, int):
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise NotSaid("no whole num_speculative_tokens in it") from None
    draft.plan["draft_tokens"] = drafted
    draft.assumed.append("draft model: its own weights and cache are not counted")
    return f"draft_tokens {drafted}"


def _images(draft: Draft, value: Any) -> str:
    try:
        given = json.loads(value) if isinstance(value, str) and value.lstrip().startswith("{") else {}
        images = given["image"]
        if not isinstance(images, int):
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise NotSaid("only a JSON object with a whole image is read") from None
    draft.plan["images"] = images
    return f"images {images}"


SETTINGS: Final[Table] = {
    **named("model model-tag", is_model()),
    **named("tensor-parallel-size tp", sets("tp")),
    **named("pipeline-parallel-size pp", sets("pp")),
    **named("data-parallel-size dp", sets("dp")),
    **named("enable-expert-parallel ep", states("expert_parallel", truth, is_switch=True)),
    "max-model-len": sets("context", scaled),
    "gpu-memory-utilization": sets("gpu_memory_utilization", number),
    "max-num-batched-tokens": sets("max_batched_tokens", scaled),
    "max-num-seqs": sets("max_seqs", scaled),
    "block-size": sets("block_size"),
    "kv-cache-dtype": sets("kv_dtype", one_of(KV, "not a cache format here")),
    "kv-cache-memory-bytes": sets("kv_memory_gib", lambda value: scaled(value) / 2**30),
    **named("quantization q", Setting(_quantised)),
    "dtype": Setting(_dtype),
    "enforce-eager": switches("enforce_eager"),
    "enable-prefix-caching": switches("prefix_caching", True, False),
    "no-enable-prefix-caching": switches("prefix_caching", False, True),
    "async-scheduling": switches("async_scheduling", True, False),
    "no-async-scheduling": switches("async_scheduling", False, True),
    "speculative-config": Setting(speculation),
    "speculative-config.num-speculative-tokens": sets("draft_tokens"),
    "limit-mm-per-prompt": Setting(_images),
    "limit-mm-per-prompt.image": sets("images"),
    "language-model-only": Setting(lambda draft, value: draft.plan.update(images=0) or "images 0", is_switch=True),
    "cpu-offload-gb": refuses("weights in host memory are not modelled for vLLM", unless=lambda value: str(value) == "0"),
    "swap-space": refuses("host memory is not counted"),
    "enable-lora": adapters(1),
    "max-lora-rank": sets("lora_rank"),
    "max-loras": sets("lora_slots"),
    "compilation-config": refuses("CUDA graphs are taken as by default"),
    **named("O", refuses("CUDA graphs are taken as by default")),
    "hf-overrides": refuses("the config is read as the checkpoint has it"),
    "rope-scaling": refuses("the config is read as the checkpoint has it"),
    "runner": refuses("only generation is modelled", unless=lambda value: value in ("auto", "generate")),
    "task": refuses("only generation is modelled", unless=lambda value: value in ("auto", "generate")),
    "mm-encoder-tp-mode": refuses("how the encoder is split is not modelled"),
    "decode-context-parallel-size": refuses("context parallelism of the cache is not modelled", unless=lambda v: str(v) == "1"),
    "kv-transfer-config": refuses("moving caches between servers is not modelled"),
    "revision": refuses("the newest config is read; write owner/name@revision as MODEL for another"),
    "speculative-config.method": refuses("the draft's own weights and cache are not counted"),
    "config": Setting(lambda draft, value: take_file(draft, value, SETTINGS)),
    **ignores(
        "limit-mm-per-prompt.video limit-mm-per-prompt.audio mm-processor-cache-type "
        "host port api-key served-model-name chat-template tool-call-parser reasoning-parser generation-config seed "
        "tokenizer tokenizer-mode config-format load-format download-dir max-log-len uvicorn-log-level root-path "
        "allowed-origins allowed-methods allowed-headers limit-mm-per-prompt-cache mm-processor-cache-gb mm-processor-kwargs "
        "allowed-local-media-path media-io-kwargs default-chat-template-kwargs chat-template-content-format "
        "distributed-executor-backend response-role otlp-traces-endpoint max-logprobs logits-processors "
        "override-generation-config lora-modules data-parallel-address data-parallel-rpc-port data-parallel-start-rank "
        "data-parallel-size-local api-server-count nnodes node-rank master-addr master-port uds ssl-keyfile ssl-certfile "
        "tool-parser-plugin reasoning-parser-plugin structured-outputs-config guided-decoding-backend stream-interval"
    ),
    **ignores(
        "trust-remote-code enable-auto-tool-choice disable-log-requests disable-log-stats no-enable-log-requests headless "
        "enable-log-requests enable-chunked-prefill disable-custom-all-reduce enable-reasoning enable-server-load-tracking "
        "enable-prompt-tokens-details disable-uvicorn-access-log enable-request-id-headers data-parallel-hybrid-lb "
        "data-parallel-external-lb enable-force-include-usage no-enable-chunked-prefill",
        is_switch=True,
    ),
}  # fmt: skip


def finish(draft: Draft) -> None:
    """Make the fields that several settings give together."""
    draft.plan["engine"] = "vllm"
    ranks = draft.plan.get("tp", 1) * draft.plan.get("dp", 1)
    if draft.facts.get("expert_parallel") and ranks > 1:
        draft.plan["ep"] = ranks
    if "dtype" in draft.facts and "weights" not in draft.plan:
        draft.plan["weights"] = draft.facts["dtype"]
    draft.assume("context", 4096, "--max-model-len is left out, so that the server takes the model's whole context; a sequence of 4096 "
                 "tokens is asked for here")  # fmt: skip


FLAGS: Final = {
    "tp": "--tensor-parallel-size", "pp": "--pipeline-parallel-size", "dp": "--data-parallel-size", "context": "--max-model-len",
    "gpu_memory_utilization": "--gpu-memory-utilization", "max_batched_tokens": "--max-num-batched-tokens",
    "max_seqs": "--max-num-seqs", "block_size": "--block-size", "enforce_eager": "--enforce-eager",
    "prefix_caching": "--enable-prefix-caching", "async_scheduling": "--async-scheduling",
}  # fmt: skip


def write(writing: Writing) -> str:
    """The `vllm serve` command of a plan."""
    plan = writing.plan
    writing.only("engine", "vllm", "logical")
    words = ["vllm", "serve", writing.hub_id, *flags(writing, FLAGS)]
    if writing.say("ep", 1) > 1:
        if plan.ep != plan.tp * plan.dp:
            writing.unsaid("ep", "vLLM's expert parallelism is tp x dp")
        else:
            words.append("--enable-expert-parallel")
    if (weights := writing.say("weights", "auto")) != "auto":
        methods = {
            "fp8": "fp8",
            "awq-int4": "awq",
            "gptq-int4": "gptq",
            "nf4": "bitsandbytes",
            "mxfp4": "mxfp4",
            "nvfp4": "modelopt_fp4",
        }
        dtypes = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
        if weights in methods:
            words += ["--quantization", methods[weights]]
        elif weights in dtypes:
            words += ["--dtype", dtypes[weights]]
        else:
            writing.unsaid("weights", "vLLM has no such format")
    if (cache := writing.say("kv_dtype", "auto")) != "auto":
        kinds = {"fp8": "fp8", "bf16": "bfloat16", "fp16": "float16"}
        words += (
            ["--kv-cache-dtype", kinds[cache]]
            if cache in kinds
            else writing.unsaid("kv_dtype", "vLLM has no such cache")
        )
    if (memory := writing.say("kv_memory_gib", None)) is not None:
        words += ["--kv-cache-memory-bytes", str(round(memory * 2**30))]
    if (drafted := writing.say("draft_tokens", 0)) > 0:
        words += ["--speculative-config", json.dumps({"num_speculative_tokens": drafted})]
    if (slots := writing.say("lora_slots", None)) is not None:
        words += ["--enable-lora", "--max-loras", str(slots), "--max-lora-rank", str(writing.say("lora_rank", 16))]
    if (images := writing.say("images", None)) is not None:
        words += ["--limit-mm-per-prompt", json.dumps({"image": images})]
    return left_over(writing, words)
