"""Runs as other tools write them: what is read, what is named, what is refused, and the way there and back."""

from __future__ import annotations

import json
import random
from contextlib import suppress

import pytest

from calc.cli import run
from calc.commands import COMMANDS
from calc.errors import InputError
from calc.external_formats.formats import TOOLS, read, write
from calc.external_formats.shell import commands

VLLM = "CUDA_VISIBLE_DEVICES=0,1 vllm serve Qwen/Qwen3-8B -tp 2 --max-model-len=8k --port 8000 --new-flag 3 --enforce-eager"


def test_every_word_of_a_command_is_in_one_list():
    found = read(VLLM)
    assert (found.tool, found.command, found.model) == ("vllm", "serve", "qwen3-8b")
    assert found.given == {"engine": "vllm", "tp": 2, "context": 8000, "enforce_eager": True}
    assert [one.split(":")[0] for one in found.understood] == [
        "-tp 2", "--max-model-len 8k", "--port 8000", "--enforce-eager true", "Qwen/Qwen3-8B",
    ]  # fmt: skip
    assert found.not_understood == ("--new-flag 3: not a setting known here",)
    assert found.command_line() == "python -m calc serve qwen3-8b --engine vllm --tp 2 --context 8000 --enforce-eager"


def test_the_command_line_answers_with_the_keys_of_the_contract():
    answer = json.loads(run(["from", *VLLM.split()[1:], "--format", "json"]))
    assert {"command", "plan", "understood", "not_understood", "assumed", "model", "tool"} <= set(answer)
    assert answer["plan"]["tp"] == 2
    assert "not_understood  --new-flag 3" in run(["from", VLLM])


def test_a_run_is_read_from_a_file(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(
        '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}'
    )
    answer = json.loads(run(["from", str(file), "--gpus", "8", "--format", "json"]))
    assert answer["plan"] == {
        "zero": 3, "micro_batch": 2, "dp": 8, "recipe": "mixed-16", "implementation": "deepspeed",
    }  # fmt: skip


def test_variables_and_arrays_of_a_script_are_put_in():
    array = "ARGS=(\n  --tensor-model-parallel-size $TP  # ranks\n  # --fp16\n  --bf16\n)"
    script = f'TP=4\n{array}\ntorchrun --nproc_per_node 8 p.py "${{ARGS[@]}}"'
    words = commands(script)[-1].words
    assert words == ["torchrun", "--nproc_per_node", "8", "p.py", "--tensor-model-parallel-size", "4", "--bf16"]


def test_a_variable_without_a_value_is_named_and_sets_nothing():
    found = read("vllm serve $MODEL --tensor-parallel-size $TP")
    assert found.not_understood == (
        "--tensor-parallel-size $TP: a shell variable without a value here",
        "$MODEL: a shell variable without a value here",
    )
    assert "tp" not in found.given


def test_sglangs_attention_groups_lie_within_its_tensor_parallelism():
    found = read(
        "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 16 --dp 2 --enable-dp-attention"
    )
    assert (found.given["tp"], found.given["dp"]) == (8, 2)
    replicas = read("python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp 2")
    assert "dp" not in replicas.given
    assert any("replicas" in one for one in replicas.not_understood)


@pytest.mark.parametrize(
    ("command", "slots", "rank"),
    [
        ("vllm serve a/b --enable-lora --lora-modules x=y", 1, 16),
        ("vllm serve a/b --max-loras 4 --enable-lora --max-lora-rank 64", 4, 64),
        ("python -m sglang.launch_server --model-path a/b --enable-lora --max-lora-rank 32", 8, 32),
        ("python -m sglang.launch_server --model-path a/b --enable-lora --max-loras-per-batch 2", 2, 16),
    ],
)
def test_adapters_of_a_server_are_slots_of_a_rank(command, slots, rank):
    found = read(command)
    assert (found.plan.lora_slots, found.plan.lora_rank, found.not_understood) == (slots, rank, ())


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        ("exps=CPU", 10_000),
        (r"\.ffn_.*_exps\.=CPU", 10_000),
        (r"blk\.\d+\.ffn_(up|down|gate)_exps=CPU", 10_000),
        (r"blk\.[0-9]\.ffn_.*_exps=CPU", 10),
        (r"blk\.([0-9]|1[0-9])\.ffn_.*_exps\.=CPU", 20),
        ("ffn_up_exps=CPU", None),  # a part of the experts
        (r"blk\.2[0-9]\.ffn_.*_exps=CPU", None),  # layers in the middle
        (".*=CPU", None),
        ("exps=CUDA1", None),
        ("(=CPU", None),
        ("(a+)+b=CPU", None),  # takes long
        ("(.*)(.*)(.*)(.*)x=CPU", None),
    ],
)
def test_llama_servers_pattern_of_experts_is_layers_of_the_host_or_not_understood(pattern, layers):
    found = read(f"llama-server -m model-Q8_0.gguf -ot '{pattern}'")
    assert found.plan.n_cpu_moe == layers
    assert any(text.startswith("-ot") or "override-tensor" in text for text in found.not_understood) is (layers is None)


def test_llama_servers_context_is_that_of_all_slots():
    found = read("llama-server -m model-Q8_0.gguf -c 32768 -np 4 -ngl 20 -ctk q8_0 -ctv q8_0")
    assert found.given == {
        "engine": "llama.cpp", "context": 8192, "concurrency": 4, "gpu_layers": 20, "kv_dtype": "q8_0", "weights": "gguf-Q8_0",
    }  # fmt: skip


def test_ranks_of_megatron_are_what_the_launcher_has_beyond_the_model():
    text = "torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --bf16"
    assert read(text).given["dp"] == 4
    assert read(text, gpus=64).given["dp"] == 8


ROUND_TRIPS = {
    "vllm": (
        {"engine": "vllm", "context": 4096},
        {"engine": "vllm", "tp": 4, "pp": 2, "context": 32768, "gpu_memory_utilization": 0.9, "kv_dtype": "fp8", "max_seqs": 64},
        {"engine": "vllm", "dp": 8, "ep": 8, "context": 1000, "weights": "fp8", "prefix_caching": False, "async_scheduling": False},
        {"engine": "vllm", "context": 512, "max_batched_tokens": 8192, "block_size": 32, "enforce_eager": True, "draft_tokens": 3},
        {"engine": "vllm", "context": 512, "images": 0, "kv_memory_gib": 12.5, "weights": "fp16"},
    ),
    "llama-server": (
        {"engine": "llama.cpp", "context": 8192, "concurrency": 4, "kv_dtype": "fp16", "weights": "gguf-Q4_K_M"},
        {"engine": "llama.cpp", "context": 100, "concurrency": 1, "kv_dtype": "q8_0", "weights": "gguf-Q8_0", "ubatch": 1024,
         "gpu_layers": 12, "flash_attention": False, "max_batched_tokens": 4096, "output": 64},
    ),
    "deepspeed": (
        {"implementation": "deepspeed", "recipe": "mixed-16", "zero": 2, "dp": 8, "micro_batch": 4, "global_batch": 64},
        {"implementation": "deepspeed", "recipe": "mixed-16", "zero": 3, "dp": 16, "micro_batch": 1, "global_batch": 16,
         "offload": "parameters", "nvme": True, "reduce_bucket_size": 10**7, "stage3_param_persistence_threshold": 0,
         "overlap_comm": False, "optimizer": "lion"},
    ),
    "trl": (
        {"dp": 8, "zero": 3, "recipe": "fsdp-bf16", "objective": "sft", "recompute": "full", "micro_batch": 2, "global_batch": 64},
        {"recipe": "bf16-autocast", "objective": "sft", "method": "lora", "lora_rank": 32, "lora_targets": ("all-linear",), "seq": 2048,
         "global_batch": 1, "attention": "flash", "recompute": "none", "lora_dropout": 0.05},
        {"recipe": "bf16-autocast", "objective": "sft", "method": "qlora", "optimizer": "paged-adamw", "global_batch": 4},
        {"dp": 4, "zero": 2, "recipe": "mixed-16", "implementation": "deepspeed", "objective": "sft", "global_batch": 4},
        {"recipe": "pure-bf16", "objective": "dpo", "seq": 1024, "prompt_tokens": 512, "global_batch": 2, "micro_batch": 2},
        {"recipe": "pure-bf16", "objective": "grpo", "seq": 768, "prompt_tokens": 512, "global_batch": 8, "micro_batch": 8},
        {"recipe": "amp", "objective": "sft", "implementation": "liger", "optimizer_kernel": "fused", "global_batch": 1},
    ),
    "torchtitan": (
        {"implementation": "torchtitan", "recipe": "fsdp-bf16", "zero": 3, "dp": 8, "recompute": "selective", "seq": 8192},
        {"implementation": "torchtitan", "recipe": "fsdp-bf16", "zero": 3, "dp": 16, "dp_replicate": 2, "tp": 8, "cp": 2, "micro_batch": 2,
         "global_batch": 64, "recompute": "full", "optimizer_kernel": "fused", "reshard_after_forward": False},
    ),
    "megatron": (
        {"implementation": "fused", "recipe": "megatron-bf16", "dp": 4, "tp": 2, "pp": 2, "zero": 1, "global_batch": 64,
         "sequence_parallel": True},
        {"implementation": "fused", "recipe": "fp8", "dp": 8, "seq": 8192, "global_batch": 128, "dropout": "off", "recompute": "full",
         "loss": "fused", "attention": "flash"},
        {"implementation": "fused", "recipe": "megatron-fp16", "tp": 8, "pp": 8, "dp": 1, "virtual_stages": 2, "schedule": "interleaved",
         "global_batch": 16, "sequence_parallel": False, "recompute": "selective"},
        {"implementation": "paper", "recipe": "megatron-bf16", "dp": 8, "cp": 2, "ep": 4, "global_batch": 8},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("tool", "fields"), [(tool, fields) for tool, rows in ROUND_TRIPS.items() for fields in rows])
def test_a_plan_comes_back_as_it_went(tool, fields):
    plan = COMMANDS[TOOLS[tool].command].plan(**fields)
    text, notes = write(tool, "meta-llama-3.1-8b", plan)
    back = read(text)
    assert back.tool == tool
    assert not back.not_understood
    assert not [note for note in notes if not note.startswith("MODEL")]
    assert back.plan == plan or _equal_beyond_defaults(back.plan, plan)


def _equal_beyond_defaults(back, plan) -> bool:
    """The same step: a global batch or switches that say what the default is count as left out."""
    same = {"global_batch": getattr(plan, "batch", None)}
    assert {**back.model_dump(), **same} == {**plan.model_dump(), **same}
    return getattr(back, "batch", None) == same["global_batch"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["vllm", "qwen3-8b", "--engine", "vllm", "--kv-dtype", "int4"], "--kv-dtype int4 cannot be said to vllm"),
        (["vllm", "qwen3-8b", "--engine", "vllm", "--cached-prompt", "5"], "--cached-prompt 5 cannot be said to vllm"),
        (["trl", "qwen3-8b", "--recipe", "megatron-bf16"], "--recipe megatron-bf16 cannot be said to trl"),
    ],
)
def test_what_a_tool_cannot_be_told_is_said(argv, message, capsys):
    run(["to", *argv])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["to", "sglang", "qwen3-8b"], "FORMAT: 'sglang' is not allowed; it must be one of vllm, "),
        (["to", "vllm", "qwen3-8b", "--engine", "sglang"], "--engine: 'sglang' is not allowed; vllm runs vllm or logical"),
        (["to", "torchtitan", "qwen3-8b"], "--implementation: 'hf' is not allowed; torchtitan runs torchtitan"),
        (["from", "no-such-file.yaml"], "FILE: 'no-such-file.yaml' is not allowed; there is no such file"),
        (["from", "/"], "FILE: '/' is not allowed; it must be a plain file"),
        (["from", VLLM, "--as", "tgi"], "--as: 'tgi' is not allowed; it must be one of vllm, "),
        (["from", VLLM, "--format", "csv"], "--format: 'csv' is not allowed; it must be one of table, json"),
        (["from", VLLM, "--gpus", "0"], "--gpus: '0' is not allowed; it must be a whole number from 1 to"),
        (["from", "vllm serve m --tensor-parallel-size two"], "--tensor-parallel-size: 'two' is not allowed; it must be a whole number"),
        (["from", "vllm serve m --tensor-parallel-size 0"], "--tp: 0 is not allowed"),
        (["from", "vllm serve m --tensor-parallel-size 'half"], "text: not a command line (no closing quotation)"),
        (["from", "trl ppo --model_name_or_path m"], "trl: 'ppo' is not allowed"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(argv, message):
    with pytest.raises(InputError) as error:
        run(argv)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "", " \n", "{", '{"a": 1}', "[1]", "a: [", "a: &x [1]\nb: *x", "!!python/object/apply:os.system [ls]", "hello there", "[a]\nb = ",
        '{"zero_optimization": {"stage": "three"}}', '{"zero_optimization": {"stage": [3]}}', '{"zero_optimization": {"stage": 9}}',
        '{"architectures": ["LlamaForCausalLM"], "hidden_size": 1}', "distributed_type: FSDP\nnum_processes: many",
        "base_model: 5\nsequence_len: true", "[training]\nseq_len = 'x'", "{" * 100_000, '{"a":' * 50_000, "[" * 100_000,
        "a=$a$a; " * 3000 + "vllm serve m -tp 1 " + "$a" * 1000, "A='" + "x" * 60_000 + "'; vllm serve $A$A$A$A", "x" * (2**20 + 1),
        "vllm serve " + "\0", "a: b\n" * 5 + "a: " + "[" * 5000, "vllm serve m --max-model-len 1e400", "vllm serve m --max-model-len inf",
        "vllm serve m --x " + "'" * 32_001, "vllm serve " + "'" + "x " * 16_000 + "'", "A=( " * 8_000, "[" + ".".join("a" * 30_000) + "]",
        "\n" * 2**17 + "a", "base_model: x\n" + "".join(f"k{count}: 1\n" for count in range(9_000)), "vllm serve m " + " #" * 16_000 + '"',
    ],
)  # fmt: skip
def test_text_that_is_no_run_is_refused_in_one_line(text):
    with pytest.raises(InputError) as error:
        read(text)
    assert len(str(error.value)) < 400


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    file = tmp_path / "large.yaml"
    with file.open("wb") as opened:
        opened.truncate(50 * 2**20)
    with pytest.raises(InputError, match="bytes; such a file has at most 1,048,576"):
        run(["from", str(file)])


def mutated(text: str, choose: random.Random) -> str:
    """The text with a few characters or words dropped, doubled, moved or replaced."""
    pieces = text.split(" ") if choose.random() < 0.5 else list(text)
    for _ in range(choose.randint(1, 4)):
        at = choose.randrange(len(pieces))
        how = choose.randrange(4)
        if how == 0:
            pieces[at] = choose.choice(
                ["", "-1", "1e999", "nan", "null", "{", "}", "[", '"', "'", "$(x)", "${a", "--", "true", "\x00", "𝟙"]
            )
        elif how == 1:
            pieces.insert(at, pieces[choose.randrange(len(pieces))])
        elif how == 2:
            pieces.insert(at, pieces.pop(choose.randrange(len(pieces))))
        elif len(pieces) > 1:
            pieces.pop(at)
    return (" " if len(pieces) < len(text) / 2 else "").join(pieces)


def originals() -> list[str]:
    texts = [VLLM, "llama-server -hf a/b:Q4_K_M -c 8192 -np 2 -ngl 99 -fa on"]
    texts += [
        write(tool, "meta-llama-3.1-8b", COMMANDS[TOOLS[tool].command].plan(**rows[-1]))[0]
        for tool, rows in ROUND_TRIPS.items()
    ]
    texts.append(
        "base_model: a/b\nadapter: qlora\nload_in_4bit: true\nfsdp:\n  - full_shard\nfsdp_config:\n  fsdp_offload_params: true\n"
    )
    texts.append(
        "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n"
    )
    return texts


def test_mutated_runs_are_read_or_refused():
    choose = random.Random(20261130)
    texts = originals()
    for count in range(600):
        text = mutated(texts[count % len(texts)], choose)
        with suppress(InputError):
            read(text)
