"""Reading engines' start-up logs: the facts, the units, the colours, and what is no log."""

from __future__ import annotations

import io
import json

import pytest

from calc.cli import run
from calc.errors import InputError
from calc.serving.logs import read
from calc.serving.logs.comparison import model_of
from calc.serving.logs.reader import bounded_lines
from calc.units import GiB, MiB

VLLM = """\
\x1b[1;36m(EngineCore pid=7)\x1b[0;0m INFO [core.py:9] Initializing a V1 LLM engine (v0.19.0) with config: \
model='meta-llama/Llama-3.1-8B-Instruct', dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=1, \
pipeline_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto
INFO Model loading took 14.99 GiB memory and 14.43 seconds
INFO Memory profiling takes 17.96 seconds. Total non KV cache memory: 17.12GiB; torch peak memory increase: 1.89GiB; \
non-torch forward increase memory: 0.25GiB; weights memory: 14.99GiB.
INFO Free memory on device (78.57/79.19 GiB) on startup. Desired GPU memory utilization is (0.95, 75.23 GiB).
INFO \x1b[32mAvailable KV cache memory: 58.11 GiB\x1b[0m
INFO GPU KV cache size: 476,016 tokens
INFO Maximum concurrency for 8,192 tokens per request: 58.11x
INFO Graph capturing finished in 12 secs, took 0.91 GiB
"""
VLLM_0_6 = """\
INFO Memory profiling results: total_gpu_memory=23.58GiB initial_memory_usage=0.40GiB peak_torch_memory=17.06GiB \
memory_usage_post_profile=15.3GiB non_torch_memory=0.35GiB kv_cache_size=3.81GiB gpu_memory_utilization=0.90
INFO # GPU blocks: 1952, # CPU blocks: 2048
"""
SGLANG = """\
[2025-09-01 10:00:00] server_args=ServerArgs(model_path='Qwen/Qwen3-8B', tp_size=2, mem_fraction_static=0.85, kv_cache_dtype='auto')
[2025-09-01 10:01:00 TP0] Load weight end. type=Qwen3ForCausalLM, dtype=torch.bfloat16, avail mem=70.00 GB, mem usage=7.64 GB.
[2025-09-01 10:01:10 TP0] KV Cache is allocated. #tokens: 800000, K size: 27.47 GB, V size: 27.47 GB
[2025-09-01 10:01:20 TP0] max_total_num_tokens=800000, chunked_prefill_size=8192, max_prefill_tokens=16384, context_len=40960
"""
LLAMA_CPP = """\
llama_model_loader: - kv   2:                               general.name str              = Pythia 2.8B
load_tensors: offloaded 33/33 layers to GPU
load_tensors:        CUDA0 model buffer size =  2524.00 MiB
load_tensors:        CUDA1 model buffer size =  2525.71 MiB
load_tensors:   CPU_Mapped model buffer size =   245.62 MiB
llama_context: n_ctx         = 2048
llama_context: flash_attn    = 0
llama_kv_cache_init:      CUDA0 KV buffer size =   640.00 MiB
llama_context:      CUDA0 compute buffer size =   162.00 MiB
"""
OLLAMA = (
    'time=2024-07-24 level=INFO msg="offload to rocm" layers.model=81 layers.offload=43 memory.required.full="43.1 GiB" '
    'memory.required.kv="640.0 MiB" memory.weights.total="39.9 GiB" memory.graph.full="313.0 MiB"\n'
)
TENSORRT = """\
[TensorRT-LLM][INFO] Loaded engine size: 15336 MiB
[TensorRT-LLM][INFO] Number of tokens per block: 64.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 55.80 GiB for max tokens in paged KV cache (457088).
"""


def facts(text: str):
    return read(bounded_lines(io.StringIO(text)))


@pytest.mark.parametrize(("text", "engine", "expected"), [
    (VLLM, "vllm", {"weights": 14.99, "activation": 1.89, "non_torch": 0.25, "kv_budget": 58.11, "total": 79.19, "graphs": 0.91}),
    (VLLM_0_6, "vllm", {"total": 23.58, "torch": 17.06, "non_torch": 0.35, "kv_budget": 3.81}),
    (SGLANG, "sglang", {"weights": 7.64, "keys": 27.47, "values": 27.47}),
    (LLAMA_CPP, "llama.cpp", {"weights": 5049.71 / 1024, "host_weights": 245.62 / 1024, "cache": 0.625, "activation": 162 / 1024}),
    (OLLAMA, "ollama", {"weights": 39.9, "cache": 0.625, "activation": 313 / 1024}),
    (TENSORRT, "tensorrt-llm", {"weights": 15_336 / 1024, "kv_budget": 55.8}),
])  # fmt: skip
def test_each_engines_lines_are_read(text, engine, expected):
    found = facts(text)
    assert found.engine == engine
    assert {key: round(value / GiB, 4) for key, value in found.bytes.items()} == {
        key: round(value, 4) for key, value in expected.items()
    }


def test_the_log_is_laid_next_to_the_answer(tmp_path):
    path = tmp_path / "vllm.log"
    path.write_text(VLLM)
    answer = json.loads(run(["log", str(path), "--gpu", "h100-sxm-80gb", "--format", "json"]))
    assert answer["plan"] | {"engine": "vllm", "engine_version": "0.19", "context": 8192} == answer["plan"]
    assert answer["model"] == "meta-llama-3.1-8b"
    rows = {row["quantity"]: row for row in answer["rows"]}
    assert abs(rows["weights"]["relative_error"]) < 0.001
    assert abs(rows["activation"]["relative_error"]) < 0.005
    assert abs(rows["kv_budget"]["relative_error"]) < 0.001
    assert abs(rows["kv_tokens of the logged budget"]["residual"]) <= 16
    assert rows["kv_tokens"]["line"] == 6
    assert answer["constants"] == {"activation_gib": 1.89, "non_torch_gib": 0.25, "cuda_graph_gib": 0.91}
    assert "adopt: serve ... --activation-gib 1.89" in run(["log", str(path), "--gpu", "h100-sxm-80gb"])


def test_the_peak_of_the_first_engine_holds_the_weights(tmp_path):
    path = tmp_path / "vllm.log"
    path.write_text("INFO Loading model weights took 14.9888 GB\n" + VLLM_0_6)
    answer = json.loads(run(["log", str(path), "--model", "meta-llama-3.1-8b", "--context", "20000",
                             "--engine-version", "0.6", "--format", "json"]))  # fmt: skip
    rows = {row["quantity"]: row for row in answer["rows"]}
    assert abs(rows["activation"]["relative_error"]) < 0.01
    assert abs(rows["kv_blocks of the logged budget"]["residual"]) <= 3


def test_buffers_of_several_gpus_add_up(tmp_path):
    assert facts(LLAMA_CPP).bytes["weights"] == round(2524 * MiB) + round(2525.71 * MiB)


def test_a_copys_name_finds_its_base():
    assert model_of(facts(VLLM)) == "meta-llama-3.1-8b"
    assert model_of(facts(SGLANG)) == "qwen3-8b"
    assert model_of(facts(OLLAMA)) is None


@pytest.mark.parametrize("text", ["", "hello\n", "\x00\x1b[0m\n" * 100, "A" * 100_000])
def test_what_is_no_log_is_refused(text):
    with pytest.raises(InputError, match="no line of it"):
        facts(text)


@pytest.mark.slow
def test_a_log_without_end_is_cut_at_100_mb():
    def endless():
        while True:
            yield "x" * 10_000 + "\n"

    with pytest.raises(InputError, match="over 100 MB"):
        read(endless())


def test_a_file_that_is_not_there_is_one_line():
    with pytest.raises(InputError, match="cannot be read"):
        run(["log", "/no/such/file"])
