"""The workloads themselves: what calc predicts is what torch and transformers hold, to the byte."""

import pytest

torch = pytest.importorskip("torch")

from calc.breakdown import Breakdown, Component, compare  # noqa: E402
from calc.errors import InputError  # noqa: E402
from calc.hardware import gpus  # noqa: E402
from calc.model.config import from_config  # noqa: E402
from calc.parameters import parameters  # noqa: E402
from calc.units import GiB  # noqa: E402
from measure import child  # noqa: E402
from measure.devices import CATALOGUE, Device, resolve  # noqa: E402
from measure.setting import SIZES, Setting  # noqa: E402
from measure.timing import Spread, spread, time_call  # noqa: E402
from measure.workloads import WORKLOADS, attention, decoder_states, inference, kernel_rows, matmul_and_bandwidth  # noqa: E402
from measure.workloads.cases import timed_size  # noqa: E402
from tests.latex import assert_formulas_hold  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("decoder states")]  # one run for all tests

# bytes of parameters, gradients and moments for each parameter (FORMULAS: 16, 16 and 8 bytes)
BYTES = {"fp32": (4, 4, 8), "amp": (4, 4, 8), "pure-bf16": (2, 2, 4)}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return resolve(request.param)


def setting(device, size="small", messages=None):
    return Setting(
        device, size, lambda fraction, message: messages.append((fraction, message)) if messages is not None else None
    )


@pytest.fixture(scope="module")
def cpu_run():
    """Rows and progress of one real run."""
    messages = []
    return list(decoder_states.run(setting(resolve("cpu"), messages=messages))), messages


@pytest.fixture(scope="module")
def cpu_rows(cpu_run):
    return cpu_run[0]


def test_every_byte_of_a_real_decoders_states_is_predicted(cpu_rows):
    assert {row.case for row in cpu_rows} == {f"small, {recipe}" for recipe in BYTES}
    assert len(cpu_rows) == 3 * (4 * 12 + 1 + 1)  # four states of twelve weights, the step counters, the total
    for row in cpu_rows:
        assert row.predicted == row.measured, row
        assert isinstance(row.measured, int)
        assert row.unit == "bytes"


@pytest.mark.parametrize("recipe", BYTES)
def test_the_states_take_the_ledgers_bytes_a_parameter(cpu_rows, recipe):
    count = parameters(from_config(decoder_states.SIZES["small"].config)).total
    found = {}
    for row in cpu_rows:
        if row.case == f"small, {recipe}" and row.quantity not in ("total", "optimizer/step"):
            group = row.quantity.split("/")[0]
            found[group] = found.get(group, 0) + row.measured
    assert tuple(found[group] for group in ("parameters", "gradients", "optimizer")) == tuple(
        count * each for each in BYTES[recipe]
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recipe", BYTES)
def test_every_leaf_carries_a_formula_that_gives_its_value(size, recipe):
    assert_formulas_hold(decoder_states.predict(decoder_states.SIZES[size].config, recipe))


def test_a_weight_that_nobody_predicted_stays_visible():
    config = decoder_states.SIZES["small"].config
    model, optimizer = decoder_states._trained(
        decoder_states.SIZES["small"], torch.float32, False, setting(resolve("cpu")), 0.0
    )
    model.model.adapter = torch.nn.Linear(3, 5, bias=False)
    pairs = compare(decoder_states.predict(config, "fp32"), decoder_states.observe(model, optimizer))
    (pair,) = [pair for pair in pairs if "other" in pair.path]
    assert (pair.path, pair.predicted, pair.observed) == ("parameters/other/model.adapter.weight", None, 60)
    assert pairs[-1].observed == pairs[-1].predicted + 60


def test_memory_that_two_weights_share_counts_once():
    model, optimizer = decoder_states._trained(
        decoder_states.SIZES["small"], torch.float32, False, setting(resolve("cpu")), 0.0
    )
    before = decoder_states.observe(model, optimizer).total
    model.model.embed_tokens.weight.data = model.lm_head.weight.data
    assert decoder_states.observe(model, optimizer).total == before - model.lm_head.weight.nbytes


def test_progress_never_goes_back(cpu_run):
    _, messages = cpu_run
    fractions = [fraction for fraction, _ in messages]
    assert fractions == sorted(fractions)
    assert 0 <= fractions[0] <= fractions[-1] <= 1


def test_the_allocator_counts_each_tensor_in_granules_of_512_bytes():
    steps = Component("optimizer", children=(Component("step", 12),))
    root = Component("", children=(Component("bias", 100, count=3), Component("weight", 1024), steps))
    assert list(decoder_states.rounded(Breakdown(root, "bytes"))) == [3 * 512, 1024]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_same_holds_on_a_gpu_and_its_allocator_agrees_within_three_per_cent():
    for row in decoder_states.run(setting(resolve("cuda"))):
        if row.quantity == "allocated by torch":
            assert abs(row.relative_error) < 0.03
        else:
            assert row.predicted == row.measured, row


def test_bandwidth_is_measured_with_its_spread(monkeypatch, device):
    monkeypatch.setattr(matmul_and_bandwidth, "_BYTES", {"small": (2**20, "1 MiB")})
    monkeypatch.setattr(
        matmul_and_bandwidth, "time_call", lambda call, where, seconds: time_call(call, where, seconds=0.01)
    )
    rows = [row for row in matmul_and_bandwidth.memory_bandwidth(setting(device)) if row.unit == "GB/s"]
    programs = ["torch", "triton"] if device.kind != "cpu" else ["torch"]
    names = [f"{kind}/{program}" for kind in ("copy", "triad") for program in programs]
    assert [row.quantity for row in rows] == [f"bandwidth/{name}" for name in names]
    for row in rows:
        assert 0 < row.p20 <= row.measured <= row.p80
        assert row.predicted is None or row.measured < 1.05 * row.predicted


def test_bandwidth_is_bytes_over_seconds_against_the_data_sheet(monkeypatch):
    monkeypatch.setattr(matmul_and_bandwidth, "_BYTES", {"small": (10**6, "1 MB")})
    monkeypatch.setattr(
        matmul_and_bandwidth, "time_call", lambda call, where, seconds: (call(), Spread(0.001, 0.002, 0.004))[1]
    )
    monkeypatch.setattr(matmul_and_bandwidth, "_copies", lambda setting: {"copy/torch": lambda out, x, y: out.copy_(x)})
    triad = {"triad/torch": lambda out, x, y: torch.add(x, y, alpha=3.0, out=out)}
    monkeypatch.setattr(matmul_and_bandwidth, "_triads", lambda setting: triad)
    named = Device("cpu", "cuda", "as if", 2**34, "a100-sxm-80gb")
    copy, triad, _ = matmul_and_bandwidth.memory_bandwidth(setting(named))
    assert (copy.p20, copy.measured, copy.p80) == (0.5, 1.0, 2.0)
    assert (triad.p20, triad.measured, triad.p80) == (0.75, 1.5, 3.0)
    assert copy.predicted == triad.predicted == 2039.0  # GB/s, NVIDIA's A100 80GB SXM data sheet


def test_a_copy_that_is_wrong_is_not_timed_into_a_result(monkeypatch):
    monkeypatch.setattr(matmul_and_bandwidth, "_BYTES", {"small": (2**10, "1 KiB")})
    monkeypatch.setattr(matmul_and_bandwidth, "_copies", lambda setting: {"copy/torch": lambda out, x, y: None})
    monkeypatch.setattr(
        matmul_and_bandwidth, "time_call", lambda call, where, seconds: (call(), Spread(1.0, 1.0, 1.0))[1]
    )
    with pytest.raises(RuntimeError, match="copy/torch is not equal"):
        list(matmul_and_bandwidth.memory_bandwidth(setting(resolve("cpu"))))


def test_a_spread_is_the_median_and_the_fifths_around_it():
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]) == pytest.approx((2.0, 3.5, 5.0))


def test_the_catalogue_has_every_device_that_a_driver_names():
    assert set(CATALOGUE.values()) <= set(gpus())


class FullCard:
    """What torch.cuda says of a card of 80 GiB of which so much is free, and what it is asked to do."""

    def __init__(self, free):
        self.free, self.current, self.fraction = free, None, None

    def mem_get_info(self, name):
        return self.free, 80 * GiB

    def set_device(self, name):
        self.current = name

    def set_per_process_memory_fraction(self, fraction, name):
        self.fraction = fraction


def test_a_card_that_another_process_fills_is_refused_before_anything_is_built(monkeypatch):
    card = FullCard(100 * 2**20)
    for name in ("mem_get_info", "set_device", "set_per_process_memory_fraction"):
        monkeypatch.setattr(torch.cuda, name, getattr(card, name))
    device = Device("cuda:1", "cuda", "as if", 80 * GiB)
    with pytest.raises(InputError, match=r"cuda:1 has 100\.00 MiB of 80\.00 GiB free: another process fills it"):
        child._guard_memory(device, 0.8)
    assert card.fraction is None
    card.free = 20 * GiB
    child._guard_memory(device, 0.8)
    assert card.fraction == 0.8 * 20 / 80  # of what is free, not of what there is
    assert card.current == "cuda:1"  # events and Triton's launches go to the current device


def test_without_triton_a_gpu_is_measured_by_torch_alone(monkeypatch):
    monkeypatch.setattr(kernel_rows, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda name: (8, 0))
    gpu = setting(Device("cuda:0", "cuda", "as if", 80 * GiB))
    assert [program for _, program, _ in matmul_and_bandwidth._matmuls(gpu, 64)] == ["torch"] * 4
    assert list(matmul_and_bandwidth._copies(gpu)) == ["copy/torch"]
    assert list(matmul_and_bandwidth._triads(gpu)) == ["triad/torch"]
    assert list(attention._kinds(gpu)) == ["standard", "flash"]
    assert list(inference._programs(gpu, inference.gathered_decode, "paged_decode")) == ["torch"]


@pytest.mark.parametrize(
    ("kind", "capability", "formats"),
    [("cuda", (7, 5), []), ("cuda", (8, 6), ["bf16", "fp16", "int8"]), ("rocm", (9, 4), ["bf16", "fp16", "int8"])],
)
def test_triton_is_timed_in_the_formats_that_the_card_has(monkeypatch, kind, capability, formats):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda name: capability)
    gpu = setting(Device("cuda:0", kind, "as if", 80 * GiB))
    found = [
        kernel_rows.FORMATS[dtype]
        for dtype, program, _ in matmul_and_bandwidth._matmuls(gpu, 64)
        if program == "triton"
    ]
    assert found == formats
    assert kernel_rows.with_triton(gpu.device) == bool(formats)


def test_cublas_is_not_given_fewer_rows_of_int8_than_it_takes(monkeypatch):
    """It wants 17 or more (aten/src/ATen/native/cuda/Blas.cpp); the CPU's kernel takes any."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda name: (8, 0))
    gpu = setting(Device("cuda:0", "cuda", "as if", 80 * GiB))
    assert [dtype for dtype, program, _ in matmul_and_bandwidth._matmuls(gpu, 16) if program == "torch"] == [
        torch.float32, torch.bfloat16, torch.float16,
    ]  # fmt: skip
    assert torch.int8 in [dtype for dtype, *_ in matmul_and_bandwidth._matmuls(setting(resolve("cpu")), 16)]


def test_a_gpu_is_timed_at_sizes_that_its_caches_do_not_hold():
    assert timed_size(setting(Device("cuda:0", "cuda", "as if", 80 * GiB))).size == "medium"
    assert timed_size(setting(resolve("cpu"))).size == "small"


def test_every_workload_says_what_it_tests():
    for name, workload in WORKLOADS.items():
        assert workload.name == name
        assert workload.tests
        assert workload.needs
