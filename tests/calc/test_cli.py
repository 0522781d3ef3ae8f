"""The command line: contract keys for every model, one line and exit 2 for bad input, the same bytes as the functions."""

from __future__ import annotations

import csv
import io
import itertools
import json
import shlex
import subprocess
import sys
from importlib import import_module

import pytest

from calc.catalogue import catalogue, load
from calc.cli import help_text, main, run
from calc.commands import COMMANDS, command_line
from calc.errors import InputError, validated
from calc.hardware import gpus
from calc.version import VERSION
from tests.offenders import each

# the keys that scripts depend on; more may be there
CONTRACT = {
    "time": """step_seconds tokens_per_s tokens_per_s_per_gpu model_tflops_per_gpu mfu hfu low high source gpus seconds gpu_hours
        cost energy_kwh components""",
    "params": "model total active embedding trainable components",
    "train": """peak_bytes peak_phase phases parameters_bytes gradients_bytes optimizer_bytes activations_bytes overhead_bytes
        reserved_bytes driver_bytes gpu_memory_bytes fits headroom_bytes stages components assumptions""",
    "serve": """weights_bytes kv_bytes_per_token kv_fixed_bytes kv_bytes_per_sequence kv_budget_bytes kv_blocks kv_tokens
        max_concurrency activation_bytes fits ttft_s tpot_s tokens_per_s bound components""",
    "compute": """forward_flops_per_token training_flops_per_token attention_flops_per_token six_nd_flops training_flops
        hardware_flops seconds gpu_hours cost energy_kwh mfu hfu components causal full""",
    "pipeline": "utilization bubble_fraction makespan span_bubble in_flight weight_versions timeline",
}
# what the leaves of each command sum to
TOTAL = {
    "params": lambda answer: answer["total"],
    "train": lambda answer: answer["peak_bytes"],
    "compute": lambda answer: answer["training_flops"],
}


# the first model of each class; every model is asked by the tests of the functions, and a training step's allocator is slow
ONE_OF_EACH_FAMILY = {load(name).architecture: name for name in reversed(list(catalogue()))}.values()


@each(itertools.product(["params", "serve", "compute"], ONE_OF_EACH_FAMILY), sampled=90)
def test_a_model_of_each_family_is_answered_with_the_contract_keys(case):
    _check_contract(*case)


@each(ONE_OF_EACH_FAMILY, sampled=20)
def test_a_training_step_of_each_family_is_answered_with_the_contract_keys(model):
    _check_contract("train", model)


def _check_contract(command, model):
    gpu = [] if command == "params" else ["--gpu", "h100-sxm-80gb"]
    answer = json.loads(run([command, model, *gpu, "--format", "json"]))
    assert not set(CONTRACT[command].split()) - set(answer)
    if command in TOTAL:
        assert sum(part["value"] for part in answer["components"]) == TOTAL[command](answer)
    for part in answer["components"]:
        assert {"path", "value", "unit", "formula", "source"} <= set(part)
        assert part["formula"], part["path"]
        assert part["source"], part["path"]


def test_a_config_without_a_class_is_read_by_its_model_type(tmp_path):
    config = {key: value for key, value in LLAMA.items() if key != "architectures"} | {"model_type": "llama"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    answer = json.loads(run(["params", str(path), "--format", "json"]))
    assert answer["architecture"] == "LlamaForCausalLM"
    assert any("model_type" in text for text in answer["assumptions"])


def test_a_pipeline_is_answered_with_the_contract_keys():
    answer = json.loads(run(["pipeline", "--format", "json"]))
    assert not set(CONTRACT["pipeline"].split()) - set(answer)
    assert set(answer["timeline"][0]) == {"stage", "kind", "microbatch", "chunk", "start", "end"}


NEED_A_GPU = ("time", "plan", "plan-serving", "communication", "simulate")


def test_a_step_is_timed_with_the_contract_keys():
    answer = json.loads(run(["time", "gpt2", "--gpu", "a100-sxm-80gb", "--format", "json"]))
    assert not set(CONTRACT["time"].split()) - set(answer)
    assert sum(part["value"] for part in answer["components"]) == pytest.approx(answer["step_seconds"])


def test_layouts_are_ranked_with_the_contract_keys():
    argv = ["plan", "gpt2", "--gpu", "h100-sxm-80gb", "--gpus", "2", "--global-batch", "4", "--seq", "512"]
    answer = json.loads(run([*argv, "--format", "json"]))
    assert {"layouts", "considered", "fitting", "rejected"} <= set(answer)
    wanted = """tp pp cp ep dp zero virtual_stages micro_batch recompute schedule peak_bytes step_seconds tokens_per_s_per_gpu mfu"""
    assert not set(wanted.split()) - set(answer["layouts"][0])


@pytest.mark.parametrize("argv", [["time", "gpt2"], ["plan", "gpt2", "--gpus", "8"]])
def test_time_and_plan_need_a_gpu_and_say_so(argv):
    with pytest.raises(InputError, match="gpu: none is given"):
        run(argv)


@pytest.mark.parametrize("command", ["train", "serve", "compute"])
def test_a_gpu_is_not_needed(command):
    answer = json.loads(run([command, "llama-2-7b", "--format", "json"]))
    assert answer.get("fits") is None


@pytest.mark.parametrize("command", COMMANDS)
def test_every_format_answers(command):
    given = [command, "gpt2"] if COMMANDS[command].takes_model else [command]
    given += ["--gpu", "h100-sxm-80gb"] if command in NEED_A_GPU else []
    given += ["--gpus", "1", "--global-batch", "2", "--seq", "512"] if command == "plan" else []
    given += ["--gpus", "1", "--prompt", "512", "--output", "64"] if command == "plan-serving" else []
    given += ["--flops", "1e21"] if command == "scaling" else []
    for form in ("table", "json", "csv", "markdown"):
        assert run([*given, "--format", form])


def test_a_table_shows_every_phase_and_overhead_that_json_has():
    argv = ["train", "llama-2-7b", "--dp", "8"]
    answer, table = json.loads(run([*argv, "--format", "json"])), run(argv)
    for group in ("phases", "overhead_bytes"):
        for name, value in answer[group].items():
            assert any(line.startswith(f"{group}/{name} ") and f"({value:,})" in line for line in table.splitlines())


def test_csv_and_json_are_the_same_integers():
    rows = csv.DictReader(io.StringIO(run(["params", "mixtral-8x7b-v0.1", "--format", "csv"])))
    parts = json.loads(run(["params", "mixtral-8x7b-v0.1", "--format", "json"]))["components"]
    assert [(row["path"], int(row["value"])) for row in rows] == [(part["path"], part["value"]) for part in parts]


def test_the_catalogues_are_listed_with_their_sources():
    models = json.loads(run(["models", "--search", "llama-2", "--format", "json"]))
    assert {model["name"]: model["total"] for model in models}["llama-2-7b"] == 6_738_415_616
    assert all(model["source"] for model in models)
    listed = json.loads(run(["gpus", "--format", "json"]))
    assert [row["name"] for row in listed] == list(gpus())
    assert all(row["source"] for row in listed)


def test_a_config_is_read_from_a_file_a_folder_and_standard_input(tmp_path):
    text = json.dumps(
        {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128}
        | {"num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
    )
    (tmp_path / "config.json").write_text(text)
    answers = [
        json.loads(run(["params", str(path), "--format", "json"])) for path in (tmp_path, tmp_path / "config.json")
    ]
    piped = subprocess.run(
        [sys.executable, "-m", "calc", "params", "-", "--format", "json"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    answers.append(json.loads(piped.stdout))
    assert {answer["total"] for answer in answers} == {2 * 6400 + 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64)}
    assert any("attention_bias" in text for text in answers[0]["assumptions"])


BAD = [
    ([], 0, ""),
    (["parms"], 2, "command: 'parms'"),
    (["params", "llama-2-7x"], 2, "close names are llama-2-7b"),
    (["params", "no-such-file.json"], 2, "No such file"),
    (["params", "gpt2", "--lora-rank", "-1"], 2, "--lora-rank: '-1'"),
    (["params", "gpt2", "--lora-rank", "NaN"], 2, "--lora-rank: 'NaN'"),
    (["params", "gpt2", "--lora-rank", "9" * 5000], 2, "--lora-rank: '999"),
    (["params", "gpt2", "--rank", "8"], 2, "--rank"),
    (["params", "gpt2", "--format", "xml"], 2, "table, json, csv, markdown"),
    (["params"], 2, "MODEL"),
    (["train", "llama-2-7b", "--tp", "64"], 2, "tp (64) must divide num_attention_heads (32)"),
    (["train", "llama-2-7b", "--gpu", "h100"], 2, "h100-sxm-80gb"),
    (["train", "llama-2-7b", "--gpu-memory-gib", "-4"], 2, "--gpu-memory-gib: -4.0"),
    (["train", "llama-2-7b", "--recipe", "fp7"], 2, "--recipe: 'fp7'"),
    (["train", "llama-2-7b", "--recompute", "selective"], 2, "selective"),
    (["serve", "llama-2-7b", "--kv-dtype", "int3"], 2, "--kv-dtype: 'int3'"),
    (["compute", "llama-2-7b", "--mfu", "1.5"], 2, "--mfu: '1.5'"),
    (["pipeline", "--stages", "0"], 2, "--stages: '0'"),
    (["pipeline", "--schedule", "2f2b"], 2, "--schedule: '2f2b'"),
]


@pytest.mark.parametrize(("argv", "code", "says"), BAD, ids=[" ".join(argv)[:40] or "nothing" for argv, _, _ in BAD])
def test_bad_input_is_one_line_that_names_it_and_exit_2(argv, code, says, capsys):
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert says in err
    assert err.count("\n") == (1 if code else 0)
    assert bool(out) is (code == 0)


BAD_CONFIGS = [
    ("not json", "not JSON"),
    ("[]", "JSON object"),
    ('"text"', "JSON object"),
    ("{}", "architectures"),
    ('{"architectures": ["NoSuchModel"]}', "'NoSuchModel' is not understood"),
    ('{"architectures": "LlamaForCausalLM"}', "hidden_size: missing"),
    ("[" * 100_000, "nested too deeply"),
    ('{"architectures": ["LlamaForCausalLM"], "hidden_size": NaN}', "NaN"),
]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "intermediate_size": 128,
}
for _field in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"):
    BAD_CONFIGS.append(
        (json.dumps({key: value for key, value in LLAMA.items() if key != _field}), f"{_field}: missing")
    )
    for _value in (0, -1, 10**30, "64", 1.5, True, [64], {"a": 1}):
        BAD_CONFIGS.append((json.dumps(LLAMA | {_field: _value}), f"{_field}: "))
BAD_CONFIGS += [
    (json.dumps(LLAMA | {"num_key_value_heads": 3}), "num_key_value_heads (3) must divide num_attention_heads (4)"),
    (
        json.dumps(LLAMA | {"num_attention_heads": 5, "num_key_value_heads": 5}),
        "num_attention_heads (5) must divide hidden_size (64)",
    ),
    (json.dumps(LLAMA | {"attention_bias": "yes"}), "attention_bias: 'yes'"),
    (json.dumps(LLAMA | {"pad": "x" * 9_000_000}), "at most 8,388,608"),
]


@pytest.mark.parametrize(
    ("text", "says"), BAD_CONFIGS, ids=[f"{at}-{says[:30]}" for at, (_, says) in enumerate(BAD_CONFIGS)]
)
def test_a_bad_config_is_refused_with_the_field_and_the_value(text, says, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert main(["params", str(path)]) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert err.count("\n") == 1
    assert len(err) < 500
    assert not out


def test_the_command_line_of_a_scenario_gives_its_answer():
    command = COMMANDS["train"]
    plan = validated(command.plan, {"seq": 2048, "micro_batch": 2, "zero": 3, "dp": 8})
    line = command_line(command, plan, "llama-2-7b", {"gpu": "h100-sxm-80gb", "gpu_memory_gib": None})
    words = shlex.split(line)
    assert words[:5] == ["python", "-m", "calc", "train", "llama-2-7b"]
    shown = json.loads(run([*words[3:], "--format", "json"]))
    from calc.hardware import gpu

    answer = command.answer(plan, load("llama-2-7b"), gpu("h100-sxm-80gb")).as_json()
    assert shown == {"version": VERSION, **json.loads(json.dumps(answer))}


@pytest.mark.parametrize("program", ["calc", "measure"])
def test_the_version_is_the_packages(program, capsys):
    assert import_module(f"{program}.cli").main(["--version"]) == 0
    assert capsys.readouterr().out == f"plumbline {VERSION}\n"


def test_the_help_of_all_commands_begins_in_one_column():
    rows = help_text([("--version", "the version")]).splitlines()[2:]
    names = [name for name, _ in (row.split(maxsplit=1) for row in rows)]
    assert set(COMMANDS) < set(names)
    assert len({len(row) - len(row.split(maxsplit=1)[1]) for row in rows}) == 1


def test_it_starts_without_torch_and_the_other_heavy_ones():
    code = (
        "import sys; from calc.cli import run; run(['params', 'gpt2']); "
        "print([name for name in ('torch', 'triton', 'streamlit', 'transformers', 'pandas', 'plotly') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_a_closed_pipe_is_no_error():
    line = f"{shlex.quote(sys.executable)} -m calc models | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {line}"], capture_output=True, text=True)
    assert done.stderr == ""


IDLE = [
    ("train llama-2-7b", "--lora-rank 16", "method is full"),
    ("train llama-2-7b", "--schedule gpipe", "pp is 1"),
    ("train llama-2-7b --dp 4", "--dp-replicate 2", "zero is 0"),
    ("train llama-2-7b --dp 4 --zero 1", "--no-reshard-after-forward", "zero is 1"),
    ("train llama-2-7b --optimizer sgd", "--optimizer-kernel fused", "the step of sgd makes no copies"),
    ("train llama-2-7b --optimizer momentum", "--optimizer-kernel loop", "the step of momentum makes no copies"),
    ("train llama-2-7b --optimizer adamw-8bit", "--optimizer-kernel loop", "optimizer adamw-8bit has bitsandbytes'"),
    ("train llama-2-7b --optimizer paged-adamw", "--optimizer-kernel fused", "optimizer paged-adamw has bitsandbytes'"),
    ("train llama-2-7b --offload optimizer", "--optimizer-kernel fused", "offload is optimizer: the host updates"),
    ("train llama-2-7b", "--nvme-GBps 2", "nothing lies on NVMe"),
    ("params llama-2-7b", "--lora-targets q_proj", "lora_rank is left out"),
    ("compute llama-2-7b --gpu h100-sxm-80gb --gpu-hours 10", "--mfu 0.3", "gpu_hours gives it"),
]


@pytest.mark.parametrize(("command", "flags", "reason"), IDLE)
def test_a_flag_without_effect_is_told_and_has_none(command: str, flags: str, reason: str, capsys):
    json_of = ("--format", "json")
    plain = run((*command.split(), *json_of))
    assert capsys.readouterr().err == ""
    assert run((*command.split(), *flags.split(), *json_of)) == plain
    name = flags.split()[0].replace("--no-", "--")
    printed = capsys.readouterr().err
    assert printed.startswith(f"note: {name} changes nothing: {reason}")
    assert printed.count("\n") == 1


def test_offloaded_bytes_are_listed_where_there_are_some():
    plain, offloaded = (run(("train", "llama-2-7b", *flags)) for flags in ((), ("--offload", "optimizer")))
    assert "host_bytes" not in plain
    assert "host_bytes" in offloaded


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ("train llama-2-7b --seq 8k --micro-batch 1e1", "train llama-2-7b --seq 8192 --micro-batch 10"),
        ("serve llama-2-7b --context 32k", "serve llama-2-7b --context 32768"),
        ("compute llama-2-7b --tokens 1.5T --gpus 1_024", "compute llama-2-7b --tokens 1500000000000 --gpus 1024"),
    ],
)
def test_numbers_are_read_as_people_write_them(written, plain):
    assert run([*written.split(), "--format", "json"]) == run([*plain.split(), "--format", "json"])
