"""SGLang: `python -m sglang.launch_server` and its YAML config (https://docs.sglang.io/advanced_features/server_arguments.html)."""

from __future__ import annotations

from typing import Any, Final

from calc.external_formats.draft import (
    NO_EFFECT,
    Draft,
    NotSaid,
    Setting,
    adapters,
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
from calc.external_formats.vllm import DTYPES, WEIGHTS

_WEIGHTS: Final = {**WEIGHTS, "w8a8_fp8": "fp8", "w8a8_int8": "int8", "modelopt_fp8": "fp8"}
_KV: Final = {
    "auto": "auto", "fp8_e5m2": "fp8", "fp8_e4m3": "fp8", "bf16": "bf16", "bfloat16": "bf16", "fp4_e2m1": "int4",
}  # fmt: skip


def _quantised(draft: Draft, value: Any) -> str:
    draft.plan["weights"] = one_of(_WEIGHTS, "this quantisation is not a format here; the checkpoint's own is read")(
        value
    )
    return f"weights {draft.plan['weights']}"


def _dtype(draft: Draft, value: Any) -> str:
    found = one_of(DTYPES, "not a number format known here")(value)
    if found != "auto":
        draft.facts["dtype"] = found
    return NO_EFFECT if found == "auto" else f"weights {found}, where they are not quantised"


def _kv(draft: Draft, value: Any) -> str:
    found = one_of(_KV, "not a cache format here")(value)
    if found == "int4":
        raise NotSaid("4-bit floating-point caches are not modelled for SGLang")
    draft.plan["kv_dtype"] = found
    return f"kv_dtype {found}"


def _chunk(draft: Draft, value: Any) -> str:
    size = whole(value)
    if size <= 0:
        raise NotSaid("prompts in one piece are not modelled")
    draft.plan["max_batched_tokens"] = size
    return f"max_batched_tokens {size}"


SETTINGS: Final = {
    **named("model-path model", is_model()),
    **named("tensor-parallel-size tp-size tp", sets("tp")),
    **named("pipeline-parallel-size pp-size pp", sets("pp")),
    **named("data-parallel-size dp-size dp", states("dp")),
    **named("expert-parallel-size ep-size ep", sets("ep")),
    "enable-dp-attention": states("dp_attention", truth, is_switch=True),
    **named("enable-ep-moe enable-deepep-moe", states("expert_parallel", truth, is_switch=True)),
    **named("context-length max-model-len", sets("context")),
    "mem-fraction-static": sets("mem_fraction_static", number),
    "chunked-prefill-size": Setting(_chunk),
    "max-running-requests": sets("max_seqs"),
    "kv-cache-dtype": Setting(_kv),
    "quantization": Setting(_quantised),
    "dtype": Setting(_dtype),
    "page-size": sets("block_size"),
    "scheduler-recv-interval": sets("poll_steps"),
    "speculative-num-steps": sets("draft_tokens"),
    "speculative-algorithm": refuses("the draft's own weights and cache are not counted"),
    "speculative-eagle-topk": refuses("trees of drafts are not modelled", unless=lambda value: str(value) == "1"),
    "speculative-num-draft-tokens": refuses("drafted tokens are read from --speculative-num-steps"),
    **named("speculative-draft-model-path speculative-draft", refuses("the draft's own weights and cache are not counted")),
    "max-total-tokens": refuses("the cache takes what the memory leaves"),
    "max-prefill-tokens": refuses("steps are bounded by --chunked-prefill-size"),
    "disable-cuda-graph": refuses("CUDA graphs are counted as by default", is_switch=True),
    **named("cuda-graph-max-bs cuda-graph-bs", refuses("CUDA graphs are counted as by default")),
    "disable-radix-cache": switches("prefix_caching", False, True),
    "cpu-offload-gb": refuses("weights in host memory are not modelled for SGLang", unless=lambda value: str(value) == "0"),
    "enable-hierarchical-cache": refuses("caches in host memory are not modelled", is_switch=True),
    "hicache-ratio": refuses("caches in host memory are not modelled"),
    "disaggregation-mode": refuses("prefill and decode on separate servers are not modelled"),
    "moe-dense-tp-size": refuses("dense layers are split as attention is"),
    "enable-dp-lm-head": refuses("the head is split as by default", is_switch=True),
    "moe-a2a-backend": refuses("how tokens travel to experts is not asked for here", unless=lambda value: value == "none"),
    "json-model-override-args": refuses("the config is read as the checkpoint has it"),
    "is-embedding": refuses("only generation is modelled", is_switch=True),
    "enable-lora": adapters(8),
    "max-lora-rank": sets("lora_rank"),
    "max-loras-per-batch": sets("lora_slots"),
    "lora-paths": refuses("the rank of adapters is in their files: --max-lora-rank and --enable-lora say what is counted"),
    "attention-backend": refuses("the attention kernel is chosen by the GPU here"),
    "torchao-config": refuses("torchao's quantisation at load is not modelled"),
    "swa-full-tokens-ratio": refuses("the split between window and full caches is as by default"),
    **ignores(
        "host port api-key served-model-name chat-template tool-call-parser reasoning-parser tokenizer-path tokenizer-mode "
        "load-format random-seed nccl-init-addr dist-init-addr nnodes node-rank log-level watchdog-timeout schedule-policy "
        "schedule-conservativeness grammar-backend sampling-backend stream-interval decode-log-interval stream-output "
        "prefill-attention-backend decode-attention-backend moe-runner-backend fp8-gemm-backend mm-attention-backend "
        "load-balance-method warmups download-dir preferred-sampling-params tokenizer-worker-num dist-timeout base-gpu-id "
        "completion-template tool-server file-storage-path disaggregation-bootstrap-port ep-dispatch-algorithm deepep-mode nccl-port"
    ),
    **ignores(
        "trust-remote-code enable-metrics log-requests enable-p2p-check skip-tokenizer-init disable-overlap-schedule "
        "enable-torch-compile enable-mixed-chunk disable-custom-all-reduce skip-server-warmup enable-multimodal "
        "enable-deterministic-inference enable-flashinfer-allreduce-fusion enable-cache-report enable-symm-mem "
        "disable-shared-experts-fusion enable-nccl-nvls",
        is_switch=True,
    ),
}  # fmt: skip


def finish(draft: Draft) -> None:
    """Data-parallel attention divides the ranks of tp; without it each data-parallel rank is a replica of its own."""
    draft.plan["engine"] = "sglang"
    tp, dp = draft.plan.get("tp", 1), draft.whole("dp")
    if draft.facts.get("expert_parallel"):
        draft.plan.setdefault("ep", tp)
    if dp > 1 and draft.facts.get("dp_attention"):
        if tp % dp == 0:
            draft.plan["dp"], draft.plan["tp"] = dp, tp // dp
            draft.assumed.append(f"dp {dp}, tp {tp // dp}: SGLang's attention groups lie within its --tp {tp}")
        else:
            draft.not_understood.append(f"--dp {dp} --enable-dp-attention: {dp} does not divide --tp {tp}")
    elif dp > 1:
        draft.not_understood.append(f"--dp {dp}: {dp} replicas, each as described here; one replica is asked for")
    if "dtype" in draft.facts and "weights" not in draft.plan:
        draft.plan["weights"] = draft.facts["dtype"]
    draft.assume("context", 4096, "--context-length is left out, so that the server takes the model's whole context; a sequence of 4096 "
                 "tokens is asked for here")  # fmt: skip
