"""How the published serving runs were started: the options that change the speed, from the public scripts that started them.

InferenceX (formerly InferenceMAX, SemiAnalysis; Apache-2.0), https://github.com/SemiAnalysisAI/InferenceX, by date of the run:
benchmarks/single_node/MODEL_PRECISION_GPU*.sh (before 2026-02-19 benchmarks/), .github/configs/nvidia-master.yaml for the layouts with
multi-token prediction, benchmarks/benchmark_lib.sh for the client: all requests at once, ten prompts a slot, lengths drawn evenly
from 0.8 to 1.0 of the nominal. Commits read: 7f11856 (2026-02-06), 626932a (2026-03-28), 8c3eb5b (2026-04-22).
The other runs (NVIDIA's own) name no options. They are taken as the scripts of the same project write them (ai-dynamo/aiconfigurator,
Apache-2.0): every length equal, ten requests a slot (eval/benchmarks/genai_perf_runner.py), TensorRT-LLM's max_num_tokens is the batch,
one prompt and 1,500 (generator/rule_plugin/benchmark/trtllm.rule). That they were started so is an inference. Of those on vLLM the rows
themselves show that most prompts came from the prefix cache, which vLLM has on by default: the prompts of Llama-3.1-8B in fp8 ask for
more than the GPU's dense peak (2,000 tokens at 64 in flight: 1.9 of 1.98 PFLOP/s, decoding left out; 4,000 on two GPUs more). They are
taken as drawn from 100 prompts, the number that NVIDIA's client makes where nothing else is said, as in the same project's later script
(generator/config/backend_templates/benchmark/bench_run.sh.j2; AIPerf: --num-dataset-entries), ten to a slot: an inference as well.
"""

from __future__ import annotations

from typing import Any

# runs with multi-token prediction: engine's version, and the day where runs without it have the same version (nvidia-master.yaml)
_DRAFTED = {
    ("trtllm", "1.2.0rc6.post3", ""),
    ("trtllm", "1.1.0rc2.post2", "2026-01-14"),
    ("sglang", "0.5.8", ""),
    ("sglang", "0.5.9", "2026-03-20"),
}
_TRT_LEAST = {"1.2.0rc6.post2"}  # from 2026-01-29 on at least 8,192 tokens a step


def recipe(row: dict[str, Any]) -> dict[str, Any]:
    """Fields of a serving plan that the run's script sets."""
    if not row["dump"].startswith("inferencex"):
        later = 9 * row["concurrency"]
        repeated = 1 - min(1.0, max(0, 100 - row["concurrency"]) / later)
        own: dict[str, dict[str, Any]] = {
            "trtllm": {"max_batched_tokens": row["concurrency"] // row["dp"] + row["isl"] + 1500},
            "vllm": {"repeated_prompts": repeated},
            "sglang": {},
        }
        return {"length_spread": 0.0, **own[row["engine"]]}
    by_engine = {"trtllm": _trtllm, "sglang": _sglang, "vllm": _vllm}
    off = (
        {} if row["engine"] == "trtllm" else {"prefix_caching": False}
    )  # --no-enable-prefix-caching, --disable-radix-cache
    return {"length_spread": 0.2, **off, **by_engine[row["engine"]](row)}


def _drafted(row: dict[str, Any]) -> bool:
    version = row["engine_version"] or ""
    return any((row["engine"], version, day) in _DRAFTED for day in ("", row["day"]))


def _vllm(row: dict[str, Any]) -> dict[str, Any]:
    """MiniMax-M2.5 on Blackwell and Kimi-K2.5 in fp4 on B200 take two prompts a step, gpt-oss 8,192 tokens; the rest the defaults."""
    model, card = row["model"], row["gpu"]
    if (model.startswith("minimax") and card.startswith("b")) or (
        model.startswith("kimi") and row["precision"] == "fp4" and card.startswith("b200")
    ):
        return {"max_batched_tokens": 2 * row["isl"]}
    return {"max_batched_tokens": 8192} if model.startswith("gpt-oss") else {}


def _trtllm(row: dict[str, Any]) -> dict[str, Any]:
    """max_num_tokens holds one prompt and the sequences that decode; attention ranks wait up to 60 steps for each other's prompts;
    experts in FP8 run on DeepGEMM with data-parallel attention, else on TensorRT-LLM's own kernels (MOE_BACKEND)."""
    if row["model"].startswith("gpt-oss"):
        return {"max_batched_tokens": 20_000, "stream_steps": 20}
    drafted = _drafted(row)
    draft = 0 if not drafted else 1 if row["dp"] > 1 else 3
    batch = row["concurrency"] // row["dp"] * (draft + 1) if drafted else row["concurrency"]
    tokens = (batch + row["isl"] + 127) // 64 * 64
    least = 8192 if row["engine_version"] in _TRT_LEAST else 0
    found = {"max_batched_tokens": max(tokens, least), "draft_tokens": draft, "stream_steps": 10}
    if row["precision"] == "fp8" and (row["dp"] > 1 or (row["isl"] < row["osl"] and batch >= 256)):
        found["moe_backend"] = "deepgemm"
    return found | ({"gather_steps": 60} if row["dp"] > 1 else {})


def _sglang(row: dict[str, Any]) -> dict[str, Any]:
    """Chunks of 8,192 to 32,768 tokens; on Blackwell, GLM-5 excepted, a look at what has arrived every 10 or, from 16 requests on, 30
    steps."""
    model, small = row["model"], row["tp"] == 4
    if not row["gpu"].startswith("b"):
        tokens = {"qwen3.5": 16_384, "glm-5": 8192}
        return {"max_batched_tokens": next((size for name, size in tokens.items() if model.startswith(name)), 32_768)}
    if model.startswith("glm"):
        return {"max_batched_tokens": 32_768}
    found: dict[str, Any] = {"max_batched_tokens": 32_768, "poll_steps": 30 if row["concurrency"] >= 16 else 10}
    if model.startswith("deepseek"):
        if row["precision"] == "fp4" or _drafted(row):
            found["max_batched_tokens"] = 16_384
        elif small:
            found |= {"max_batched_tokens": 8192, "poll_steps": 10}
    if _drafted(row):
        found["draft_tokens"] = 2 if model.startswith("deepseek") else 3
    return found
