"""Every workload runs on the CPU in its smallest size; what is counted is exact, what is timed has its spread."""

import pytest

torch = pytest.importorskip("torch")

from calc.errors import InputError  # noqa: E402
from calc.measurements.records import Measured  # noqa: E402
from calc.model.config import from_config  # noqa: E402
from calc.training import TrainingPlan  # noqa: E402
from measure.devices import Device, resolve  # noqa: E402
from measure.setting import Setting  # noqa: E402
from measure.timing import Spread  # noqa: E402
from measure.workloads import (  # noqa: E402
    WORKLOADS,
    attention,
    compute_flops,
    inference,
    matmul_and_bandwidth,
    memory_bound_kernels,
    training_memory,
)
from measure.workloads.cases import Case, each  # noqa: E402
from measure.workloads.kernel_rows import Roofs, bandwidth_row, rate_row  # noqa: E402
from measure.workloads.models import llama, two_depths, with_depth  # noqa: E402
from measure.workloads.quantisation import NF4_BOUND, absmax_int8, nf4  # noqa: E402
from measure.workloads.steps import Program, Step, metered_step, options_of, stored  # noqa: E402

pytestmark = pytest.mark.torch

TINY = llama(64, 172, 4, 4, 2, 257)
ONE_SCALAR = 512  # the total weight that nll_loss keeps at the end of forward, in the allocator's granule


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Sizes that take a moment, and one thread: these tests are about counts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for module in (training_memory, inference, compute_flops):
        monkeypatch.setattr(module, "config_of", lambda setting: dict(TINY))
    monkeypatch.setattr(training_memory, "_SEQ", {"small": 64})
    monkeypatch.setattr(training_memory, "_VOCABULARIES", (8192, 16384))
    monkeypatch.setattr(training_memory, "_TIMED", {"small": (TINY, 32)})
    monkeypatch.setattr(compute_flops, "_SEQ", {"small": 32})
    monkeypatch.setattr(attention, "_SIZES", {"small": ((32, 64), 2, 16)})
    monkeypatch.setattr(inference, "_LENGTHS", {"small": (16, 32)})
    monkeypatch.setattr(inference, "_DECODES", {"small": (2, 40, 4, 2, 16)})
    monkeypatch.setattr(memory_bound_kernels, "_SHAPES", {"small": (4, 256)})
    monkeypatch.setattr(matmul_and_bandwidth, "_SHAPES", {"small": ((32, 48, 64),)})
    monkeypatch.setattr(matmul_and_bandwidth, "_BYTES", {"small": (2**16, "64 KiB")})

    def once(call, device, seconds=1.0, warm_up=1, least=2):
        call()
        return Spread(0.5, 1.0, 2.0)

    for module in (training_memory, inference, compute_flops, attention, matmul_and_bandwidth, memory_bound_kernels):
        monkeypatch.setattr(module, "time_call", once)
    for module in (inference, compute_flops, attention):
        monkeypatch.setattr(module, "measured_roofs", lambda device, dtype: Roofs(1e12, 1e11))
    yield
    torch.set_num_threads(threads)


def rows_of(name):
    return list(WORKLOADS[name].run(Setting(resolve("cpu"), "small", lambda fraction, message: None)))


def exact(rows):
    """Rows of bytes, each exactly as predicted but for one scalar of the loss in what forward leaves."""
    found = [row for row in rows if row.unit == "bytes" and row.measured is not None]
    for row in found:
        slack = ONE_SCALAR if row.quantity == "activations" else 0
        assert 0 <= row.measured - row.predicted <= slack, row
    return found


def test_two_depths_give_the_slope_and_the_full_depth():
    rows = exact(rows_of("saved-activations"))
    assert [row.case.split(", ")[1] for row in rows[:14]] == ["1 of 4 layers"] * 7 + ["2 of 4 layers"] * 7
    slopes = {row.quantity: row.measured for row in rows if row.quantity.startswith("slope/")}
    assert set(slopes) == {f"slope/{name}" for name in ("activations", "peak/forward", "peak/backward", "peak/step")}
    shallow, deep = (row.measured for row in rows if row.quantity == "activations" and " of 4 " in row.case)
    assert slopes["slope/activations"] == deep - shallow
    (full,) = [row for row in rows if "extended" in row.case and row.quantity == "activations"]
    assert full.measured == deep + 2 * slopes["slope/activations"]


@pytest.mark.parametrize("name", ["amp", "lora"])
def test_another_way_of_training_is_predicted_to_the_byte(name):
    rows = exact(rows_of(name))
    assert len(rows) == 3 * 7
    assert len({row.case for row in rows}) == 3


def test_the_optimizers_temporaries_are_above_the_states():
    rows = rows_of("optimizer-temporaries")
    found = {(row.case.split(", ")[1], row.quantity): row for row in rows}
    assert found["foreach", "peak/step"].measured == found["foreach", "peak/step"].predicted
    states = [found["foreach", f"states/{name}"].measured for name in ("parameters", "gradients", "optimizer")]
    assert found["foreach", "peak/step"].measured > sum(states)
    assert (
        found["fused", "peak/step"].measured
        < found["loop", "peak/step"].measured
        < found["foreach", "peak/step"].measured
    )


def test_the_logits_peak_at_two_and_a_half_and_three_times_their_fp32(monkeypatch):
    monkeypatch.setattr(
        training_memory, "_SEQ", {"small": 256}
    )  # with fewer tokens the head's gradient outweighs the logits
    rows = rows_of("logits-peak")
    exact(rows)
    assert [(row.predicted, row.measured) for row in rows if row.unit == "ratio"] == [(2.5, 2.5), (3.0, 3.0)]


def test_checkpointing_saves_what_is_predicted_and_its_time_is_measured(monkeypatch):
    monkeypatch.setattr(training_memory, "config_of", lambda setting: llama(64, 172, 4, 4, 2, 4099))
    rows = rows_of("checkpointing")
    (saving,) = [row for row in exact(rows) if row.quantity == "saving/activations"]
    assert saving.measured > 0
    (extra,) = [row for row in rows if row.quantity == "extra time"]
    assert 0.2 < extra.predicted < 0.4
    assert extra.measured == 0.0  # both were given the same time here


def test_attention_keeps_what_its_formulas_say():
    rows = rows_of("attention-memory")
    kept = {(row.case, row.quantity): row for row in exact(rows)}
    assert len(kept) == 4
    assert kept["s = 64", "kept/standard"].measured == 3 * 2 * 2 * 64 * 16 + 2 * 2 * 64 * 64
    assert kept["s = 64", "kept/flash"].measured == 2 * kept["s = 32", "kept/flash"].measured
    for way, times in (("", 1), ("/backward", 2.5)):
        assert [row.measured for row in rows if row.quantity == f"rate/flash{way}"] == [
            times * 4 * 2 * s * s * 16 / 1e12 for s in (32, 64)
        ]
    assert attention.moved_bytes("flash/backward", 64, 2, 16) == 8 * 2 * 2 * 64 * 16 + 4 * 2 * 64
    assert attention.moved_bytes("standard/backward", 64, 2, 16) == 8 * 2 * 2 * 64 * 16 + 9 * 2 * 2 * 64 * 64


def test_the_cache_grows_by_what_serve_says():
    rows = exact(rows_of("kv-cache-growth"))
    token = 2 * 2 * 16 * 2 * 2  # keys and values, 2 heads of 16 in bf16, in the two layers that are run
    assert [row.measured for row in rows] == [16 * token, 32 * token, token]


def test_a_paged_cache_is_read_at_a_bandwidth():
    rows = rows_of("paged-decode")
    exact(rows)
    grouped, latents = [row for row in rows if row.unit == "GB/s"]
    assert grouped.measured == 2 * 40 * 2 * 2 * 16 * 2 / 1e9
    assert latents.measured == 2 * 40 * (512 + 64) * 2 / 1e9
    assert latents.case.endswith("latents of 512 + 64")


def test_decoding_from_blocks_equals_attention_over_the_whole():
    keys, values = torch.randn(6, 16, 2, 8), torch.randn(6, 16, 2, 8)
    query, table = torch.randn(2, 4, 8), torch.tensor([[5, 0, 3], [2, 4, 1]])
    out = inference.gathered_decode(query, keys, values, table, 40)
    for b in range(2):
        k, v = (
            torch.cat([cache[block] for block in table[b].tolist()])[:40].repeat_interleave(2, 1)
            for cache in (keys, values)
        )
        weights = torch.softmax(torch.einsum("hd,shd->hs", query[b], k) / 8**0.5, -1)
        torch.testing.assert_close(out[b], torch.einsum("hs,shd->hd", weights, v))


def test_decoding_from_latents_equals_attention_over_keys_whose_first_part_is_the_value():
    cache, query = torch.randn(6, 16, 12), torch.randn(2, 4, 12)
    table = torch.tensor([[5, 0, 3], [2, 4, 1]])
    out = inference.gathered_latent_decode(query, cache, table, 40, value_dim=8, scale=0.3)
    for b in range(2):
        keys = torch.cat([cache[block] for block in table[b].tolist()])[:40]
        weights = torch.softmax(0.3 * query[b] @ keys.t(), -1)
        torch.testing.assert_close(out[b], weights @ keys[:, :8])


def test_operations_that_memory_bounds_are_timed_over_their_least_bytes():
    rows = rows_of("fused-kernels")
    found = {row.quantity: row.measured for row in rows if row.unit == "GB/s"}
    assert len(found) == len(memory_bound_kernels.OPERATIONS) == len(rows) // 3
    n = 4 * 256
    least = {"softmax": 4 * n, "SwiGLU": 6 * n, "cross-entropy": 4 * n, "AdamW": 28 * n, "absmax int8": 3 * n + 16}
    least |= {"RMSNorm": 4 * n + 512, "LayerNorm": 4 * n + 1024, "NF4 to bf16": (2 + 0.5 + 4 / 64) * n}
    least |= {"int8 weights": 256 * 256 + 2 * 2 * 16 * 256 + 4 * 256}
    least |= {"int4 weights": 256 * 256 / 2 + 2 * 2 * 16 * 256 + 4 * 256 * 256 / 128}
    assert {name: found[f"bandwidth/{name}/torch"] for name in least} == {
        name: nbytes / 1e9 for name, nbytes in least.items()
    }


def test_prefill_and_decode_are_timed_against_the_roofline():
    rows = [row for row in rows_of("prefill-decode") if row.unit == "seconds"]
    assert [row.quantity for row in rows] == ["time/first token", "time/each token"] * 2
    assert all(row.predicted > 0 and row.measured == 1.0 for row in rows)


def test_matmuls_are_timed_in_every_format_of_the_device():
    rows = rows_of("matmul-rate")
    assert [row.quantity for row in rows if row.unit == "TFLOP/s"] == [
        f"rate/{name}/torch" for name in ("fp32", "bf16", "fp16", "int8")
    ]
    assert rows[0].measured == 2 * 32 * 48 * 64 / 1e12
    intensity = {row.quantity: row.predicted for row in rows if row.unit == "FLOP/B"}
    assert intensity["intensity/bf16/torch"] == 2 * intensity["intensity/fp32/torch"]


def test_memory_is_timed_by_copy_and_triad():
    rows = rows_of("memory-bandwidth")
    assert [row.measured for row in rows if row.unit == "GB/s"] == [2 * 2**16 / 1e9, 3 * 2**16 / 1e9]


@pytest.mark.parametrize("name", ["pcie", "context-and-workspace"])
def test_what_needs_a_gpu_says_so_and_why(name):
    with pytest.raises(InputError, match=f"{name}: not measurable here: it needs a GPU; "):
        rows_of(name)


def test_quantisation_errors_keep_their_bounds():
    rows = rows_of("quantisation-error")
    assert len({row.case for row in rows}) == 4
    for row in rows:
        if "largest" in row.quantity:
            assert 0.9 * row.predicted < row.measured <= row.predicted * (1 + 1e-9), row
    bits = [row for row in rows if row.unit == "bits"]
    assert [round(row.predicted, 3) for row in bits] == [4.127] * 4  # QLoRA's 0.127 bits on top of the four
    assert all(0 <= row.relative_error < 0.002 for row in bits)  # the last group of scales may not be full
    uniform = {row.quantity: row.predicted for row in rows if row.case.startswith("uniform")}
    assert (round(uniform["int8/step"], 6), round(uniform["int8/largest error"], 6)) == (0.015748, 0.007874)
    assert all(row.relative_error == pytest.approx(0, abs=1e-6) for row in rows if row.quantity == "int8/step")


def test_the_quantisers_keep_what_they_can_hold_exactly():
    assert torch.equal(absmax_int8(torch.arange(-127.0, 128)), torch.arange(-127.0, 128))
    block = torch.linspace(-3, 3, 64)[None]
    assert torch.equal(nf4(nf4(block)), nf4(block))
    assert (block - nf4(block)).abs().max() <= NF4_BOUND * 3


def test_flops_are_those_that_pytorch_counts():
    rows = {row.quantity: row for row in rows_of("flops")}
    assert rows["FLOPs"].predicted == rows["FLOPs"].measured
    assert rows["6ND over FLOPs"].relative_error == 0
    assert 0 < rows["MFU of the matmul rate reached here"].measured < 1


def test_a_users_model_is_counted_at_its_own_width_without_its_memory(monkeypatch):
    """Two of the 32 layers of Llama-2-7B, on the meta device."""
    monkeypatch.undo()
    for name in ("flops", "kv-cache-growth"):
        workload = WORKLOADS[name]
        rows = list(workload.run(Setting(resolve("cpu"), "small", lambda fraction, message: None, "llama-2-7b")))
        assert all(row.case.startswith("llama-2-7b") for row in rows)
        assert all(row.measured == row.predicted for row in rows), rows
    assert rows[-1].measured == 524_288 * 2 // 32  # a token in two of its 32 layers


def test_a_case_that_runs_out_of_memory_is_halved_and_says_so():
    tried = []

    def measure(divisor):
        tried.append(divisor)
        if divisor < 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        yield Measured("", "size", None, 1024 // divisor, "bytes")

    (row,) = each(Setting(resolve("cpu"), "small", lambda fraction, message: None), [Case("a case", measure)])
    assert tried == [1, 2, 4]
    assert (row.case, row.measured) == ("a case, 1/4 of the size (out of memory)", 256)


def test_a_case_that_never_fits_ends_with_its_own_error():
    def measure(divisor):
        raise MemoryError
        yield

    with pytest.raises(MemoryError):
        list(each(Setting(resolve("cpu"), "small", lambda fraction, message: None), [Case("a case", measure)]))


def test_another_error_is_not_taken_for_a_lack_of_memory():
    def measure(divisor):
        raise RuntimeError("shapes differ")
        yield

    with pytest.raises(RuntimeError, match="shapes differ"):
        list(each(Setting(resolve("cpu"), "small", lambda fraction, message: None), [Case("a case", measure)]))


class Script:
    """A meter that reads out a list, and the storages of a program in place of the allocator."""

    def __init__(self, held, peaks):
        self._held, self._peaks, self.resets = iter(held), iter(peaks), 0

    def held(self):
        return next(self._held)

    def peak(self):
        return next(self._peaks)

    def reset(self):
        self.resets += 1


def test_a_metered_step_takes_the_workspace_out_of_every_reading():
    plan = TrainingPlan(seq=8)
    program = Program(TINY, options_of(plan), torch.device("cpu"))
    weights = stored(program.model.parameters())
    fixed = stored([*program.model.parameters(), *program.model.buffers(), program.tokens])
    known = fixed + 2 * weights  # two moments; step counters live on the host, which is this device here
    counters = 512 * len(list(program.model.parameters()))
    workspace = 1_000_000
    meter = Script(
        [known + counters + workspace, known + counters + workspace + 5000], [workspace + peak for peak in (10, 20, 30)]
    )
    step = metered_step(TINY, options_of(plan), torch.device("cpu"), meter)
    assert meter.resets == 3
    assert step[:3] == (weights, weights, 2 * weights + counters)
    assert step.activations == 5000 + fixed - weights
    assert step[4:] == (10, 20, 30)
    assert Step._fields[4:] == ("forward", "backward", "step")


def test_depths_are_a_period_of_the_layers_apart():
    assert two_depths(from_config(TINY)) == (1, 2)
    nested = {"text_config": {"num_hidden_layers": 6, "layer_types": ["sliding", "full"] * 3}, "architectures": ["X"]}
    assert with_depth(nested, 2)["text_config"] == {"num_hidden_layers": 2, "layer_types": ["sliding", "full"]}


@pytest.mark.parametrize(
    ("pattern", "depths"),
    [
        ((0,) * 5, (1, 2)),
        ((0, 1) * 4, (2, 4)),
        ((2, 0, 0, 0), (2, 3)),
        ((0, 0, 0, 1) * 3, (4, 8)),
        (((0,) * 5 + (1,)) * 3 + (0, 0), (6, 12)),
    ],
)
def test_the_first_layers_that_differ_are_in_both_depths(pattern, depths):
    class Spec:
        name = "a model"

        class layers:
            pass

    Spec.layers.pattern = pattern
    assert two_depths(Spec) == depths
    Spec.layers.pattern = (0, 1, 2)
    with pytest.raises(InputError, match="do not repeat"):
        two_depths(Spec)


def test_rates_swap_the_ends_of_their_spread():
    row = rate_row("x", Spread(1.0, 2.0, 4.0), 4 * 10**12, None)
    assert (row.p20, row.measured, row.p80, row.predicted) == (1.0, 2.0, 4.0, None)
    row = bandwidth_row("x", Spread(1.0, 2.0, 4.0), 8 * 10**9, 16e9)
    assert (row.p20, row.measured, row.p80, row.predicted) == (2.0, 4.0, 8.0, 16.0)
    assert Roofs(100.0, 10.0).seconds(1000, 50) == 10.0
    assert Roofs(None, 10.0).seconds(1000, 50) is None


def test_a_gpus_roofs_are_its_data_sheets():
    from measure.workloads.kernel_rows import sheet_roofs

    named = Device("cuda:0", "cuda", "as if", 2**34, "a100-sxm-80gb")
    assert sheet_roofs(named, torch.bfloat16) == Roofs(312e12, 2039e9)
