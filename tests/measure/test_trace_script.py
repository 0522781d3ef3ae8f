"""Users' programs on a make-believe GPU: bytes against a count by hand, the line where memory runs out, and what is refused."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import weakref
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from calc.errors import InputError
from calc.hardware import chosen_gpu
from measure.script.program import trace_program
from measure.script.result import totals

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore"),  # the programs are users': what they warn of is theirs
]

SCRIPTS = Path(__file__).parent / "scripts"


def traced(name, *args, gpu=None, ranks=1):
    return trace_program(str(SCRIPTS / f"{name}.py"), args, gpu, ranks=ranks)


class Stop(Exception):
    """Two steps are done."""


class Count(TorchDispatchMode):
    """The bytes of every real storage that operators make, in blocks of 512, and their highest sum."""

    def __init__(self):
        super().__init__()
        self.known, self.now, self.most = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in self.known:
                storage = each.untyped_storage()
                key, size = storage._cdata, (storage.nbytes() + 511) // 512 * 512
                self.known[key] = weakref.ref(storage, lambda _, key=key, size=size: self.end(key, size))
                self.now += size
                self.most = max(self.most, self.now)
        return made

    def end(self, key, size):
        del self.known[key]
        self.now -= size


@contextlib.contextmanager
def as_on_a_gpu():
    """Let optimizers choose their kernels over lists on the CPU, as they do on a GPU."""
    name = "_get_foreach_kernels_supported_devices"
    with patch.object(sys.modules["torch.optim.optimizer"], name, lambda: ["cpu"]):
        yield


def counted(name):
    """The highest bytes of a program's first two steps with real tensors, the CPU in the GPU's place."""
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    text = text.replace('"cuda:0"', '"cpu"').replace('"cuda"', '"cpu"').replace(".cuda()", "")
    steps = []

    def after(optimizer, args, kwargs):
        steps.append(1)
        if len(steps) == 2:
            raise Stop

    hook = register_optimizer_step_post_hook(after)
    try:
        with patch.object(sys, "argv", [name]), as_on_a_gpu(), Count() as count, pytest.raises(Stop):
            exec(compile(text, name, "exec"), {"__name__": "__main__"})
    finally:
        hook.remove()
    return count.most


# what a program keeps on the host, which lies among the rest where the CPU stands for the GPU
HOST = {"mlp": 512 * 256 * 4}


@pytest.mark.parametrize("name", ["mlp", "unet"])
def test_the_peak_is_that_of_the_same_steps_counted_operation_by_operation(name):
    expected = counted(name) - HOST.get(name, 0)
    assert traced(name)["peak_bytes"] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    "name", ["lightning", "nanogpt", "vit", "engine", "dpo", "grpo", "sft", "lora", "run_clm", "ddp", "fsdp"]
)
def test_a_program_runs_to_its_second_step_and_its_parts_sum_to_the_peak(name):
    ranks = 4 if name in ("ddp", "fsdp") else 1
    found = traced(name, ranks=ranks)
    assert found["steps"] == 2
    assert found["peak_bytes"] == max(found["phases"].values()) == max(row["bytes"] for row in found["timeline"])
    for kind in ("parts", "modules"):
        assert sum(found[kind].values()) == found["peak_bytes"]
    assert sum(row["value"] for row in found["components"]) == found["peak_bytes"]
    assert found["parts"]["parameters"] > 0
    assert found["peak_line"]["text"]


@pytest.mark.parametrize(
    ("name", "full", "changed"),
    [("nanogpt", ("--batch", "32"), ("--batch", "8")), ("unet", ("32",), ("8",)), ("vit", ("64",), ("16",))],
)
def test_memory_runs_out_on_a_line_of_the_script_and_a_smaller_batch_fits(name, full, changed):
    peak = traced(name, *full)["peak_bytes"]
    gpu = chosen_gpu(None, totals(None, 1, peak * 9 // 10).driver_bytes / 2**30)
    over = traced(name, *full, gpu=gpu)
    assert over["fits"] is False
    line = over["out_of_memory"]
    assert Path(line["file"]).name == f"{name}.py"
    assert line["held_bytes"] <= line["limit_bytes"] < line["held_bytes"] + line["asked_bytes"]
    assert any("micro-batch" in row["change"] for row in over["suggestions"])
    assert traced(name, *changed, gpu=gpu)["fits"] is True


def test_a_batch_on_the_host_next_to_a_model_on_the_gpu_is_the_error_that_a_gpu_gives(tmp_path):
    assert "same device" in refused(
        tmp_path, "import torch\nmodel = torch.nn.Linear(8, 8).cuda()\nmodel(torch.ones(2, 8))"
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import torch\nprint(torch.ones(2))", "without an optimizer step"),
        ("import torch\nx = 1 / 0", "train.py:2 (x = 1 / 0): ZeroDivisionError"),
        ("import urllib.request\nurllib.request.urlopen('http://example.com')", "train.py:2"),
        ("import os\nos.fork()", "train.py:2 (os.fork()): it starts another process"),
        ("import torch\ntorch.ones(2, device='cuda:3')", "GPU 3 is asked for, of 1"),
        ("import no_such_package", "train.py:1 (import no_such_package)"),
        ("import sys\nsys.exit(3)", "train.py:2 ended the program (status 3)"),
        ("x = (", "is not a Python program"),
        (
            "from transformers import AutoModelForCausalLM as A\nA.from_pretrained('nobody/nothing')",
            "train.py:2 (A.from_pretrained('nobody/nothing')): no folder nobody/nothing holds a config.json",
        ),
        (
            "import torch\n@torch.library.custom_op('mine::kernel', mutates_args=())\n"
            "def kernel(x: torch.Tensor) -> torch.Tensor:\n    return x.clone()\n"
            "kernel(torch.ones(2, device='cuda'))",
            "train.py:5 (kernel(torch.ones(2, device='cuda'))): an operator without a rule",
        ),
    ],
)
def test_what_a_trace_cannot_follow_is_named_with_its_line(tmp_path, source, said):
    assert said in refused(tmp_path, source)


def refused(folder, source):
    script = folder / "train.py"
    script.write_text(source, encoding="utf-8")
    with pytest.raises(InputError) as error:
        trace_program(str(script), [], None)
    return str(error.value)


def test_a_program_without_an_end_is_ended_by_the_command_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("while True:\n    pass", encoding="utf-8")
    words = [sys.executable, "-m", "measure", "trace", "--seconds", "4", "--script", str(script)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.strip().endswith(
        "--seconds: 4.0 is not allowed; the program took longer and was ended; allow more"
    )
