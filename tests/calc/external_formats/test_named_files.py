"""Files that a run names: opened where they lie next to it, and nowhere else."""

from __future__ import annotations

import json
import os

import pytest

from calc.cli import run
from calc.errors import InputError
from calc.external_formats.formats import read

ZERO_3 = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}
TRL = "torchrun --nproc_per_node 8 sft.py --model_name_or_path meta-llama/Llama-3.1-8B --deepspeed {}"
AXOLOTL = "base_model: meta-llama/Llama-3.1-8B\nsequence_len: 4096\nmicro_batch_size: 2\ndeepspeed: {}\n"


def written(folder, name, content):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize("name", ["mine.json", "./mine.json"])
def test_a_deepspeed_file_next_to_the_run_gives_zero_and_offloading(tmp_path, name):
    written(tmp_path, "mine.json", ZERO_3)
    found = read(TRL.format(name), folder=tmp_path)
    assert found.given["zero"] == 3
    assert found.given["offload"] == "optimizer"
    assert any("mine.json" in line and "next to the run" in line for line in found.understood)


@pytest.mark.parametrize(
    ("command", "name", "content", "expected"),
    [
        ("axolotl train run.yml", "run.yml", AXOLOTL.format("null"), {"seq": 4096, "micro_batch": 2}),
        ("llamafactory-cli train run.yaml", "run.yaml", "stage: sft\ncutoff_len: 2048\n", {"seq": 2048}),
        ("vllm serve --config run.yaml", "run.yaml", "model: m/n\nmax-model-len: 8192\n", {"context": 8192}),
        (
            "accelerate launch --config_file run.yaml sft.py --per_device_train_batch_size 2",
            "run.yaml",
            "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n",
            {"zero": 3, "dp": 8},
        ),
        ("trl sft --config run.yaml", "run.yaml", "per_device_train_batch_size: 3\n", {"micro_batch": 3}),
        (
            "torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file run.toml",
            "run.toml",
            "[training]\nlocal_batch_size = 2\nseq_len = 8192\n",
            {"micro_batch": 2, "seq": 8192},
        ),
    ],
)
def test_each_tools_own_file_is_read(tmp_path, command, name, content, expected):
    written(tmp_path, name, content)
    given = read(command, folder=tmp_path).given
    assert {key: given[key] for key in expected} == expected


def test_a_file_may_name_a_file_and_none_is_read_twice(tmp_path):
    written(tmp_path, "run.yml", AXOLOTL.format("mine.json"))
    written(tmp_path, "mine.json", ZERO_3)
    assert read("axolotl train run.yml", folder=tmp_path).given["zero"] == 3
    written(tmp_path, "again.yaml", "model: m/n\nconfig: again.yaml\n")
    found = read("vllm serve --config again.yaml", folder=tmp_path)
    assert any("read already" in line for line in found.not_understood)


@pytest.mark.parametrize(
    "name", ["../mine.json", "/etc/hosts.json", "sub/mine.json", "~/mine.json", ".mine.json", "a\\b.json"]
)
def test_a_path_is_named_and_not_opened(tmp_path, name):
    inside = tmp_path / "inside"
    (inside / "sub").mkdir(parents=True)
    for place in (tmp_path, inside / "sub"):
        written(place, "mine.json", ZERO_3)
    found = read(TRL.format("'" + name + "'"), folder=inside)
    assert any("not opened" in line for line in found.not_understood)
    assert "zero" not in found.given or found.given["zero"] != 3


def test_without_a_folder_no_file_is_opened(tmp_path, monkeypatch):
    written(tmp_path, "mine.json", ZERO_3)
    monkeypatch.chdir(tmp_path)
    assert any("not opened" in line for line in read(TRL.format("mine.json")).not_understood)


def test_links_pipes_and_what_is_missing_or_too_large_are_named(tmp_path):
    written(tmp_path, "real.json", ZERO_3)
    os.symlink(tmp_path / "real.json", tmp_path / "link.json")
    os.mkfifo(tmp_path / "pipe.json")
    written(tmp_path, "large.json", " " * 2**18)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    reasons = {
        "link": "no plain file",
        "pipe": "no plain file",
        "large": "larger than",
        "absent": "not in the folder",
        "bytes": "UTF-8",
    }
    for name, reason in reasons.items():
        found = read(TRL.format(f"{name}.json"), folder=tmp_path)
        assert any(reason in line for line in found.not_understood), name


@pytest.mark.parametrize("content", ["{", "[1,", '{"zero_optimization": {"stage": "x"}}'])
def test_a_broken_file_is_one_line(tmp_path, content):
    written(tmp_path, "mine.json", content)
    with pytest.raises(InputError) as caught:
        read(TRL.format("mine.json"), folder=tmp_path)
    assert "\n" not in str(caught.value)


def test_the_command_line_looks_next_to_the_runs_file(tmp_path):
    written(tmp_path, "run.sh", TRL.format("mine.json"))
    written(tmp_path, "mine.json", ZERO_3)
    assert json.loads(run(["from", str(tmp_path / "run.sh"), "--format", "json"]))["plan"]["zero"] == 3
