"""Every kernel compiles for GPUs old and new, within their registers and shared memory, as kernels/compiled.csv records."""

import csv
import datetime
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from kernels import launch
from kernels.launch import SHARED, SPILL, Clean, Compiled

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
NOT_KERNELS = {"__init__", "launch", "attention_tiles", "standard_attention"}
TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")
# kernels whose blocks compiled.csv chooses; the others have one shape of block, tuned by the clock alone
PRUNED = {
    "flash_attention._forward",
    "flash_attention_backward._keys",
    "flash_attention_backward._queries",
    "matmul._matmul",
    "paged_decode._decode",
    "int8_matmul._int8_matmul",
    "int4_matmul._int4_matmul",
}


@pytest.fixture(scope="module")
def rows():
    return launch.table()


def chosen(rows):
    """What tuning may try: the clean rows of kernels that the table prunes, every row of the others."""
    return [
        row for row in rows if row.kernel not in PRUNED or (row.spilled <= SPILL and row.shared <= SHARED[row.target])
    ]


def test_every_kernel_is_recorded_for_every_target(rows):
    kernels = {path.stem for path in (ROOT / "kernels").glob("*.py")} - NOT_KERNELS
    for target in TARGETS:
        assert {row.kernel.split(".")[0] for row in rows if row.target == target} == kernels


def test_nothing_that_is_tried_spills_or_asks_for_more_shared_memory_than_there_is(rows):
    assert [row for row in chosen(rows) if row.spilled > SPILL or row.shared > SHARED[row.target]] == []


def test_every_case_of_a_pruned_kernel_has_a_clean_choice_on_every_target_and_on_a_consumer_card(rows):
    cases = {(row.kernel, row.case, row.target) for row in rows if row.kernel in PRUNED}
    clean = {(row.kernel, row.case, row.target) for row in chosen(rows) if row.kernel in PRUNED}
    consumer = {
        (row.kernel, row.case, row.target)
        for row in chosen(rows)
        if row.kernel in PRUNED and row.target == "cuda:80" and row.shared <= SHARED["cuda:86"]
    }
    assert clean == cases
    assert consumer == {case for case in cases if case[2] == "cuda:80"}


def test_products_run_on_the_tensor_cores(rows):
    newest = {"cuda:80": "mma.sync", "cuda:90": "wgmma", "cuda:100": "tcgen05", "hip:gfx942": "mfma"}
    products = [row for row in chosen(rows) if row.kernel in PRUNED]
    for kernel in {"flash_attention._forward", "flash_attention_backward._queries", "matmul._matmul"}:
        for target, instruction in newest.items():
            found = {row.tensor for row in products if (row.kernel, row.target) == (kernel, target)}
            assert instruction in found, (kernel, target)


def test_copies_and_logits_of_odd_vocabularies_are_read_16_bytes_at_a_time(rows):
    moved = [row for row in rows if row.kernel in ("copy._copy", "cross_entropy._cross_entropy")]
    assert {row.case for row in moved} == {"", "50257", "128256", "262144"}
    # a block of 1024 gives each of CDNA's 256 threads four elements of 16 bits
    narrow = [row for row in moved if row.wide < 16 and (row.target, row.blocks) != ("hip:gfx942", "BLOCK=1024")]
    assert narrow == []


def test_a_sample_compiles_to_what_is_recorded(rows, tmp_path):
    """One choice of one kernel, drawn by the day, is compiled anew."""
    drawn = random.Random(datetime.date.today().toordinal()).choice(rows)
    chosen = drawn[:1] if drawn.blocks == "-" else (drawn.kernel, drawn.blocks, str(drawn.warps), str(drawn.stages))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)  # this process may interpret kernels; that one compiles them
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_kernels", drawn.target, *chosen],
        capture_output=True, text=True, env=environment, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    same = [row for row in rows if (row.kernel, row.target, *row[3:6]) == (drawn.kernel, drawn.target, *drawn[3:6])]
    assert [tuple(row) for row in csv.reader(done.stdout.splitlines())] == [tuple(map(str, row)) for row in same]


class Choice:
    num_warps, num_stages = 8, 2

    def __init__(self, **kwargs):
        self.kwargs = kwargs


@pytest.mark.parametrize(
    ("backend", "arch", "target"),
    [
        ("cuda", 75, "cuda:80"),
        ("cuda", 89, "cuda:80"),
        ("cuda", 90, "cuda:90"),
        ("cuda", 103, "cuda:100"),
        ("cuda", 120, "cuda:80"),
        ("hip", "gfx950", "hip:gfx942"),
    ],
)
def test_a_gpu_that_is_not_recorded_takes_the_rows_of_one_with_its_instructions(backend, arch, target):
    assert launch.nearest(backend, arch) == target


def test_choices_that_spill_or_do_not_fit_are_not_tried(monkeypatch):
    from types import SimpleNamespace

    import torch
    import triton

    def row(bm, spilled, shared, tensor="mma.sync"):
        return Compiled("k", "64", "cuda:80", f"BM={bm}", 8, 2, 255, spilled, shared, tensor, 16)

    made = [row(256, SPILL + 1, 1024), row(128, SPILL, 100 << 10), row(64, 0, 50 << 10), row(32, 0, 1024)]
    made.append(row(48, 0, 1024, "-"))  # no product is left in it
    monkeypatch.setattr(launch, "table", lambda: made)
    launch._by_choice.cache_clear()
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    driver = SimpleNamespace(
        get_current_target=lambda: SimpleNamespace(backend="cuda", arch=89),
        get_current_device=lambda: 0,
        utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": SHARED["cuda:86"]}),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver, raising=False)
    choices = [Choice(BM=bm) for bm in (256, 128, 64, 48, 32)]
    prune = Clean("k", lambda given: str(given["D"]))
    half = {"x_ptr": torch.zeros(1, dtype=torch.float16), "D": 64}
    assert [choice.kwargs["BM"] for choice in prune(choices, half)] == [64, 32]
    single = {"x_ptr": torch.zeros(1), "D": 64}  # twice the shared memory
    assert [choice.kwargs["BM"] for choice in prune(choices, single)] == [32]
    assert [choice.kwargs["BM"] for choice in prune(choices, {**half, "D": 96})] == [32]  # not recorded: the last
    useful = Clean("k", lambda given: "64", lambda given: given["BM"] < 64)
    assert [choice.kwargs["BM"] for choice in useful(choices, half)] == [32]
    launch._by_choice.cache_clear()
