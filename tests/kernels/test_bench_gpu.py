"""The table of `make bench-gpu`, in tiny sizes in Triton's interpreter; and what it says without a GPU."""

from functools import partial

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from measure.devices import resolve  # noqa: E402
from measure.timing import Spread  # noqa: E402
from measure.workloads import inference  # noqa: E402
from measure.workloads.memory_bound_kernels import OPERATIONS, Given  # noqa: E402
from tests import bench_gpu  # noqa: E402
from tests.bench_gpu import Line, Sizes  # noqa: E402

pytestmark = pytest.mark.torch
TINY = Sizes(copied=2**10, matmul=32, attention=(1, 1, 32, 16), rows=8, columns=256)
# least shares that were set for kernels on a GPU
TARGETS = {
    "copy": ("torch", 0.95),
    "matmul bf16, 32": ("torch", 0.9),
    "flash attention, forward": ("torch", 0.85),
    "flash attention, backward": ("torch", 0.7),
    "RMSNorm": ("roof", 0.9),
    "softmax": ("roof", 0.9),
    "cross-entropy": ("roof", 0.9),
    "AdamW": ("roof", 0.9),
    "paged decode": ("roof", 0.8),
}


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled for the GPU in this process")
def test_every_target_is_a_line_of_the_table(monkeypatch):
    monkeypatch.setattr(inference, "_DECODES", {"small": (2, 40, 4, 2, 16)})
    monkeypatch.setattr(inference, "_programs", _both)
    called = []

    def clock(call):
        called.append(call())
        return Spread(0.5, 1.0, 2.0)

    lines = list(bench_gpu.lines(resolve("cpu"), TINY, clock))
    assert len(called) == 2 * len(lines)  # each kernel ran, and the vendor's program
    found = {line.name: (line.of, line.target) for line in lines}
    assert {name: found[name] for name in TARGETS} == TARGETS
    shares = {line.name: line.share for line in lines}
    assert shares["copy"] == 1.0  # both were given the same time
    assert shares["softmax"] == 2 * 2 * 8 * 256 / (2 * 2**10)  # bytes of the one over bytes of the copy
    assert {line.of for line in lines} == {"torch", "roof"}


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled for the GPU in this process")
def test_what_is_timed_next_to_each_other_computes_the_same():
    for make in OPERATIONS:
        torch.manual_seed(0)
        made = make(Given(torch.device("cpu"), 8, 256, with_triton=True))
        ours, vendors = made.triton(), made.torch()
        if made.name == "cross-entropy":  # the gradient alone, and the loss with it
            ours, vendors = ours[1], vendors[0]
        elif made.name == "absmax int8":
            ours, vendors = ours[0].float(), vendors[0].float()
            assert (ours - vendors).abs().max() <= 1  # bf16's division may round to the next step
            continue
        elif made.name == "AdamW":  # in place
            continue
        error = (ours.double() - vendors.double()).pow(2).mean().sqrt() / vendors.double().pow(2).mean().sqrt()
        assert error < 0.02, made.name


def _both(setting, plain, kernel, *given, **named):
    from kernels import paged_decode

    return {"torch": plain, "triton": partial(getattr(paged_decode, kernel), *given, **named)}


def test_a_line_says_whether_its_target_is_met():
    times = Spread(0.001, 0.002, 0.003)
    assert Line("copy", times, times, "torch", 0.96, 0.95).text().split() == [
        "copy", "2.000", "2.000", "0.96", "of", "torch", "0.95", "met",
    ]  # fmt: skip
    assert Line("copy", times, times, "torch", 0.94, 0.95).text().endswith("MISSED")
    assert Line("RoPE", times, times, "roof", 0.5, None).text().endswith("of roof")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys):
    bench_gpu.main()
    said = capsys.readouterr().out
    assert said.startswith("bench-gpu: nothing was timed; no GPU: ")
    assert said.count("\n") == 1
