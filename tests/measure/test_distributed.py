"""Several ranks under torchrun: two and four gloo processes run every job, and measure what is predicted."""

import math
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from calc.errors import InputError  # noqa: E402
from calc.model.config import from_config  # noqa: E402
from calc.parameters import parameters  # noqa: E402
from calc.pipeline import PipelinePlan, simulate  # noqa: E402
from measure.distributed import JOBS, states  # noqa: E402
from measure.distributed.launch import launched  # noqa: E402
from measure.distributed.order import Order  # noqa: E402
from measure.distributed.pipelines import CASES, Op, rows_of  # noqa: E402
from measure.distributed.tensor_parallel import size_for  # noqa: E402
from measure.workloads.decoder_states import SIZES  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(sys.platform == "win32", reason="needs process groups"),
    pytest.mark.xdist_group("ranks"),  # one run of every job for all tests
]
SCRIPT = Path(__file__).with_name("ranks_misbehaving.py")
ROOT = SCRIPT.parent.parent.parent
SMALL = SIZES["small"]
PARAMETERS = parameters(from_config(SMALL.config)).total
LAYERS = SMALL.config["num_hidden_layers"]


class Ran:
    """One run of every job on so many ranks."""

    def __init__(self, ranks, kind):
        self.ranks, self.fractions = ranks, []
        order = Order(tuple(JOBS), kind, "small")
        self.rows = list(launched(order, ranks, lambda fraction, message: self.fractions.append(fraction)))

    def of(self, quantity, *words):
        """The rows of a quantity whose case has these words."""
        return [row for row in self.rows if row.quantity == quantity and all(word in row.case for word in words)]

    def one(self, quantity, *words):
        (row,) = self.of(quantity, *words)
        return row


def pytest_generate_tests(metafunc):
    """`ran`: on two gloo processes, with --ranks 4 (`make test-all`) on four too, and on two GPUs where there are."""
    if "ran" in metafunc.fixturenames:
        runs = [(ranks, "cpu") for ranks in sorted({2, metafunc.config.getoption("ranks")})]
        runs += [pytest.param((2, "cuda"), marks=pytest.mark.gpu)] if torch.cuda.device_count() > 1 else []
        metafunc.parametrize("ran", runs, indirect=True, scope="module", ids=lambda run: f"{run[0]} {run[1]} ranks")


@pytest.fixture(scope="module")
def ran(request):
    return Ran(*request.param)


def test_every_byte_that_a_rank_holds_is_predicted(ran):
    rows = [row for row in ran.rows if row.quantity.startswith("rank_")]
    cases = 4 + 2 + 4 + 2  # DDP, ZeRO-1, FSDP2, tensor parallelism
    assert len(rows) == cases * ran.ranks * 3
    for row in rows:
        assert row.predicted == row.measured, row
        assert isinstance(row.measured, int)
        assert row.unit == "bytes"


def test_the_shares_of_all_ranks_make_the_whole_optimizer_state(ran):
    """The sum is known without any plan: 8 bytes of fp32 moments, or 4 of bf16, for each parameter."""
    for words, width in ((("fp32", "ddp"), 8), (("pure-bf16", "ddp"), 4)):
        recipe, _ = words
        for view in (False, True):
            shares = [
                ran.one(f"rank_{rank}/optimizer", recipe, f"gradient_as_bucket_view={view}").measured
                for rank in range(ran.ranks)
            ]
            assert shares == [width * PARAMETERS] * ran.ranks
    for recipe, width in (("fsdp-bf16", 8), ("pure-bf16", 4)):
        for reshard in (False, True):
            shares = [
                ran.one(f"rank_{rank}/optimizer", recipe, f"reshard_after_forward={reshard}").measured
                for rank in range(ran.ranks)
            ]
            assert sum(shares) == width * PARAMETERS


def test_ddp_keeps_a_second_copy_of_the_gradients_unless_they_are_views_into_its_buckets(ran):
    for recipe, width in (("fp32", 4), ("pure-bf16", 2)):
        for view, copies in ((False, 2), (True, 1)):
            words = (recipe, f"gradient_as_bucket_view={view}")
            buckets, both = ran.one("buckets", *words), ran.one("gradients_and_buckets", *words)
            assert buckets.predicted == buckets.measured == width * PARAMETERS
            assert both.predicted == both.measured == copies * width * PARAMETERS


def test_zero_1_deals_out_whole_tensors_so_the_largest_share_is_above_the_even_one(ran):
    largest = max(SMALL.config["vocab_size"] * SMALL.config["hidden_size"], 1)
    rows = ran.of("largest_share/optimizer")
    assert len(rows) == 2
    for row, width in zip(rows, (8, 4), strict=True):
        assert row.predicted == width * PARAMETERS // ran.ranks
        assert row.predicted <= row.measured < row.predicted + width * largest


def test_fsdp2_keeps_gathered_what_it_does_not_reshard(ran):
    def padded(rows):
        return math.ceil(rows / ran.ranks) * ran.ranks

    hidden, vocab = SMALL.config["hidden_size"], SMALL.config["vocab_size"]
    root = 2 * (2 * padded(vocab) * hidden + hidden)  # embedding, head and the last norm in bf16
    layers = 2 * (PARAMETERS - 2 * vocab * hidden - hidden)  # rows that two and four divide
    for recipe in ("fsdp-bf16", "pure-bf16"):
        for reshard, expected in ((True, root), (False, root + layers)):
            row = ran.one("gathered_after_forward", recipe, f"reshard_after_forward={reshard}")
            assert row.predicted == row.measured == expected


def test_the_divided_model_has_the_whole_ones_loss(ran):
    fp32, bf16 = ran.of("loss")
    assert fp32.measured == pytest.approx(fp32.predicted, rel=1e-6)
    assert bf16.measured == pytest.approx(bf16.predicted, rel=1e-3)  # sums of bf16 in another order


def test_pytorch_keeps_the_embeddings_gradient_whole_under_tensor_parallelism(ran):
    hidden, vocab = SMALL.config["hidden_size"], SMALL.config["vocab_size"]
    for row, width in zip(ran.of("largest_share/gradients"), (4, 2), strict=True):
        assert row.measured - row.predicted == width * hidden * (vocab - math.ceil(vocab / ran.ranks))


SENT = {  # gloo's own algorithms, in buffers that the busiest of n ranks sends
    "broadcast": lambda n: math.log2(n),  # a tree
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: 2 * (n - 1) / n,  # an all-reduce of which each rank keeps its part
    "all-to-all": lambda n: (n - 1) / n,
}
HEADERS = 8192  # bytes of gloo's own, at most


def test_a_rank_sends_the_bytes_of_the_ring_formula_or_of_gloos_own_algorithm(ran):
    if ran.rows[0].case.split(", ")[1] != "gloo" or not sys.platform.startswith("linux"):
        assert all(row.measured is None for row in ran.rows if row.quantity.endswith("/sent"))
        return
    for title, size in (("64 KiB", 2**16), ("1 MiB", 2**20), ("8 MiB", 2**23)):
        for name, buffers in SENT.items():
            row = ran.one(f"{name}/sent", title)
            assert 0 <= row.measured - buffers(ran.ranks) * size <= HEADERS, row


def test_collectives_are_predicted_by_the_ring_formulas(ran):
    n = ran.ranks
    shares = {
        "broadcast": n,
        "reduce": n,
        "all-reduce": 2 * (n - 1),
        "all-gather": n - 1,
        "reduce-scatter": n - 1,
        "all-to-all": n - 1,
    }
    for name, share in shares.items():
        assert ran.one(f"{name}/sent", "1 MiB").predicted == 2**20 * share // n


def test_bus_bandwidth_is_the_formulas_bytes_over_the_time_with_its_spread(ran):
    rows = [row for row in ran.rows if row.quantity.endswith("/bus_bandwidth")]
    assert len(rows) == 3 * 6
    for row in rows:
        name = row.quantity.split("/")[0]
        sent = next(each for each in ran.of(f"{name}/sent") if each.case == row.case)
        took = next(each for each in ran.of(f"{name}/time") if each.case == row.case)
        assert 0 < row.p20 <= row.measured <= row.p80
        assert 0 < took.p20 <= took.measured <= took.p80
        assert row.measured * 1e9 * took.measured == pytest.approx(sent.predicted)
        assert row.unit == "GB/s"


@pytest.mark.parametrize(("schedule", "chunks"), CASES)
def test_a_real_schedule_runs_the_simulations_order(ran, schedule, chunks):
    row = ran.one("operations_in_order", f", {schedule},")
    assert row.predicted == row.measured == ran.ranks * 2 * ran.ranks * chunks * 2
    used = ran.one("utilization", f", {schedule},")
    assert 0 < used.p20 <= used.measured <= used.p80 <= 1
    assert 0 < used.predicted <= 1
    assert ran.one("makespan", f", {schedule},").measured > 0


def test_progress_never_goes_back(ran):
    assert ran.fractions == sorted(ran.fractions)
    assert 0 <= ran.fractions[0] <= ran.fractions[-1] <= 1


@pytest.mark.parametrize(("schedule", "chunks"), CASES)
def test_operations_that_take_what_the_simulation_gives_them_measure_its_utilization(schedule, chunks):
    plan = PipelinePlan(schedule=schedule, stages=3, microbatches=6, virtual_stages=chunks, forward=(1, 2, 3) * chunks,
                        backward_input=(2, 5, 4) * chunks, backward_weight=0)  # fmt: skip
    answer = simulate(plan)
    step = [[] for _ in range(3)]
    for event in answer.timeline:
        part = plan.model_stage(event.stage, event.chunk)
        step[event.stage].append(Op(event.kind, part, event.microbatch, event.start, event.end))
    rows = {row.quantity: row for row in rows_of("case", schedule, chunks, 6, [step, step])}
    assert rows["operations_in_order"].predicted == rows["operations_in_order"].measured == 2 * 3 * 6 * chunks
    assert rows["utilization"].measured == pytest.approx(answer.utilization)
    assert rows["utilization"].predicted == pytest.approx(answer.utilization)
    assert rows["makespan"].predicted == pytest.approx(rows["makespan"].measured)
    step[1][0], step[1][1] = step[1][1], step[1][0]
    (row, *_) = rows_of("case", schedule, chunks, 6, [step, step])
    assert row.measured == row.predicted - 2


def test_tensors_are_dealt_out_as_zero_redundancy_optimizer_does():
    assert states.dealt([5, 1, 4, 3, 2], 2) == [8, 7]  # 5 | 4, then 3 to the second, 2 to the first, 1 to the first
    assert states.dealt([7], 3) == [7, 0, 0]


@pytest.mark.parametrize(("rows", "ranks"), [(4099, 4), (1, 4), (4, 4), (6, 4), (5, 2), (9, 8)])
def test_ranks_share_rows_as_torch_chunks_them(rows, ranks):
    chunks = [len(chunk) for chunk in torch.arange(rows).chunk(ranks)]
    assert [states.rows_on(rank, rows, ranks) for rank in range(ranks)] == chunks + [0] * (ranks - len(chunks))


@pytest.mark.parametrize(
    "plan", [{"dp": 2}, {"dp": 4, "zero": 3, "recipe": "fsdp-bf16"}, {"tp": 2, "sequence_parallel": False}]
)
def test_rank_0_holds_what_calc_training_predicts_for_a_device(plan):
    memory = states.memory_of(SMALL, **plan)
    rounded, exact = memory.states, states.predicted(memory)
    tensors = 9 * LAYERS + 3
    for whole, part, copies in zip(rounded, exact, (1, 1, 2), strict=True):
        assert 0 <= whole - part < copies * tensors * 512


def test_a_group_that_does_not_divide_the_heads_is_refused_with_the_rule():
    message = r"--ranks: 3 is not allowed; it must divide the small decoder's num_attention_heads \(8\)"
    with pytest.raises(InputError, match=message):
        size_for("small", 3)
