"""Collectives of a step: volumes by the papers' rules, placement on nodes, times against measurements, and what is exposed."""

import statistics
from dataclasses import replace

import pytest

from calc.catalogue import load
from calc.communication import CommunicationPlan, Topology, collectives_of, communication, topology_of
from calc.errors import InputError
from calc.hardware import gpu
from calc.kernel_times import kernel_times
from calc.parameters import parameters
from calc.training.pipeline_stages import stages

H100 = gpu("h100-sxm-80gb")
LLAMA = load("llama-2-7b")
WEIGHTS = 2 * parameters(LLAMA).total  # bytes in bf16

# PyTorch's all-reduce on 4 nodes of 8 B200 with 8 x 400 Gbit/s: KiB, bus bandwidth in GB/s (stas00/ml-engineering,
# network/benchmarks/README.md)
FOUR_NODES = [
    *((32, 0.65), (64, 1.27), (128, 2.35), (256, 4.06), (512, 6.99), (1024, 12.47), (2048, 20.79), (4096, 31.63)),
    *((8192, 50.61), (16384, 71.80), (32768, 142.90), (65536, 197.77), (131072, 260.50), (262144, 283.23)),
    *((524288, 309.91), (2**20, 365.99), (2**21, 371.26), (2**22, 374.66), (2**23, 376.14), (2**24, 376.71)),
]


def found(spec=LLAMA, **values):
    plan = CommunicationPlan(**values)
    (stage,) = stages(plan, spec)
    return collectives_of(spec, plan, stage)


def sent(collectives):
    return sum(each.sent_bytes for each in collectives)


def test_data_parallelism_sends_twice_the_weights_and_zero_3_three_times():
    """arXiv 1910.02054, section 7: 2 Psi for DDP and ZeRO-1 and 2, 3 Psi for ZeRO-3, times (n-1)/n."""
    ranks = 64
    for zero, times in ((0, 2), (1, 2), (2, 2)):
        assert sent(found(dp=ranks, zero=zero)) == pytest.approx(times * WEIGHTS * (ranks - 1) / ranks, rel=2e-3)
    third = found(dp=ranks, zero=3)
    root = next(each.bytes for each in third if each.name == "root/weights, forward")  # stays whole until its backward
    assert sent(third) == pytest.approx((3 * WEIGHTS - root) * (ranks - 1) / ranks, rel=2e-3)


def test_tensor_parallelism_reduces_four_times_a_layer_and_six_with_recomputation():
    """arXiv 1909.08053, figure 4: two all-reduces of s b h forward and two backward; full recomputation repeats the forward's."""
    hidden = 4096 * 4096 * 2
    for recompute, calls in (("none", 4), ("full", 6)):
        mine = [
            each for each in found(tp=4, sequence_parallel=False, recompute=recompute) if "tensor parallel" in each.name
        ]
        assert {each.bytes for each in mine} == {hidden}
        assert sum(each.calls for each in mine) == calls * 32
    divided = [each for each in found(tp=4) if "tensor parallel" in each.name]
    whole = [each for each in found(tp=4, sequence_parallel=False) if "tensor parallel" in each.name]
    assert sent(divided) == sent(whole)  # arXiv 2205.05198, section 4.2.2: no more bytes than without


def test_experts_exchange_their_tokens_twice_each_way():
    spec = load("qwen3-30b-a3b")
    mine = [each for each in found(spec, dp=8, ep=8) if each.kind == "all_to_all"]
    assert {each.bytes for each in mine} == {4096 * 2048 * 8 * 2}
    assert sum(each.calls for each in mine) == 4 * 48
    assert sent(mine) == sum(each.total_bytes for each in mine) * 7 // 8


def test_experts_are_reduced_among_the_ranks_that_hold_the_same_ones():
    """128 experts of 3 · 2048 · 768 weights over 4 ranks: two of 8 ranks hold each, every fourth."""
    mine = [each for each in found(load("qwen3-30b-a3b"), dp=8, ep=4, zero=1) if each.group.name == "dp of experts"]
    assert {(each.group.ranks, each.group.stride) for each in mine} == {(2, 4)}
    assert {each.bytes for each in mine} == {2 * 32 * 3 * 2048 * 768}
    assert [each.calls for each in mine] == [48, 48]


def test_a_ring_of_context_passes_keys_and_values_to_each_other_rank():
    mine = [each for each in found(cp=4, context_exchange="ring") if each.kind == "send"]
    kv = 1024 * 32 * 256 * 2
    assert [each.bytes for each in mine] == [kv, kv, 2 * kv]  # gradients in fp32
    assert [each.calls for each in mine] == [32 * 3, 32 * 3, 32 * 4]


def test_a_parameter_server_moves_all_gradients_and_weights_through_one_link():
    """2 (n - 1) times the bytes through one link, where a ring moves 2 (n - 1) / n of them through each."""
    ring, server = (found(dp=64, gradient_exchange=how) for how in ("all-reduce", "parameter-server"))
    assert sum(each.total_bytes for each in server) == 2 * 63 * sum(each.total_bytes for each in ring)
    plan = CommunicationPlan(dp=64, gradient_exchange="parameter-server")
    answer = communication(LLAMA, plan, H100)
    psi = sum(each.total_bytes for each in ring)
    assert answer.seconds == pytest.approx(2 * 63 * psi / (50e9 * 0.94), rel=0.02)
    assert "gradient_exchange" in CommunicationPlan(dp=8, zero=1).idle


def test_groups_fill_a_node_from_the_innermost():
    topology = Topology(kernel_times(H100), 8, 50e9)
    assert topology.inside(8, 1) == 8
    assert topology.inside(16, 8) == 1  # one card carries the ring of each rank
    assert topology.inside(16, 2) == 4
    assert topology.inside(4, 1) == 4


def test_one_ring_owns_one_card_and_eight_share_the_load():
    topology = Topology(kernel_times(H100), 8, 50e9)
    size = 2**32
    alone = topology.seconds("all_reduce", size, 4, 8)
    together = topology.seconds("all_reduce", size, 32, 1)
    # NCCL's Simple protocol: 8.4 µs, 14 µs for each hop of the ring over the network, 3.4 µs for each within a node; 1.4 times that
    assert alone == pytest.approx(2 * 3 / 4 * size / (50e9 * 0.94) + 1.4 * (8.4e-6 + 6 * 14e-6))
    assert together == pytest.approx(
        2 * 31 / 32 * size / 8 / (50e9 * 0.94) + 1.4 * (8.4e-6 + 8 * 14e-6 + (62 - 8) * 3.4e-6)
    )


def test_all_reduces_between_nodes_are_near_the_measured_ones():
    """Median of all sizes within 15 %; the sizes from 512 KiB to 64 MiB take up to 2.2 times as long as the model says."""
    topology = Topology(kernel_times(gpu("b200-180gb")), 8, 50e9)
    errors = {}
    for kib, bandwidth in FOUR_NODES:
        size = kib * 1024
        measured = 2 * 31 / 32 * size / (bandwidth * 1e9)
        errors[kib] = topology.seconds("all_reduce", size, 32, 1) / measured - 1
    assert statistics.median(map(abs, errors.values())) <= 0.15
    middle = [1 / (1 + errors[kib]) for kib, _ in FOUR_NODES if 512 <= kib <= 65536]
    assert 1.2 <= min(middle) <= max(middle) <= 2.2
    assert all(abs(errors[kib]) <= 0.05 for kib, _ in FOUR_NODES if kib >= 2**20)


def test_a_tree_between_nodes_reaches_what_nccl_has_for_its_size_and_a_ring_waits_at_the_plateau():
    """Two cards without a node around them, 1 MiB: NCCL's six candidates by hand."""
    topology = Topology(kernel_times(H100), 1, 50e9)
    size, network = 2**20, 50e9 * 0.94
    ring = [
        slower * (base + 2 * hop) + max(size / network / share, size / most)
        for base, hop, share, slower, most in (
            (6.6e-6, 2.7e-6, 0.5, 1, 30e9), (14e-6, 4e-6, 0.92, 1, 1e18), (8.4e-6, 14e-6, 1, 1.4, 1e18)
        )
    ]  # fmt: skip
    tree = [  # 64 bytes times 2 to the 14th
        base + 2 * hop + max(size / network / share, size / most) / reached
        for base, hop, share, reached, most in (
            (6.8e-6, 5e-6, 1 / 3.8, 0.5, 30e9), (14e-6, 8.5e-6, 0.92**2, 0.6, 1e18), (8.4e-6, 14e-6, 0.92, 0.5, 1e18)
        )
    ]  # fmt: skip
    assert topology.seconds("all_reduce", size, 2) == pytest.approx(min(*ring, *tree), rel=1e-12)


def test_seconds_sum_and_exposed_is_never_more():
    answer = communication(LLAMA, CommunicationPlan(dp=16, tp=8, zero=3, global_batch=64), H100)
    data = answer.as_json()
    assert answer.breakdown.total == pytest.approx(data["seconds"])
    assert sum(each["seconds"] for each in data["collectives"]) == pytest.approx(data["seconds"])
    assert sum(each["exposed_seconds"] for each in data["collectives"]) == pytest.approx(data["exposed_seconds"])
    for each in data["collectives"]:
        assert 0 <= each["exposed_seconds"] <= each["seconds"] * (1 + 1e-9)
        assert isinstance(each["bytes"], int)
        assert each["overlaps"] != "nothing" or each["exposed_seconds"] == pytest.approx(each["seconds"])
    assert any("50 GB/s a GPU between nodes of 8" in note for note in data["notes"])


def test_a_faster_network_hides_more():
    slow, fast = (
        communication(LLAMA, CommunicationPlan(dp=64, zero=3, global_batch=64, inter_GBps=speed), H100)
        for speed in (5, 500)
    )
    assert fast.seconds < slow.seconds
    assert fast.exposed_seconds < slow.exposed_seconds


def test_one_gpu_communicates_nothing():
    answer = communication(LLAMA, CommunicationPlan(), H100)
    assert answer.as_json()["collectives"] == []
    assert answer.seconds == answer.exposed_seconds == 0


@pytest.mark.parametrize(
    ("device", "message"),
    [(None, "--gpu"), (replace(H100, peaks={}), "no source")],
)
def test_missing_facts_are_named(device, message):
    with pytest.raises(InputError, match=message):
        communication(LLAMA, CommunicationPlan(dp=2), device)


# DeepEP's README: EP over nodes of eight with ConnectX-7: tokens of 7168 features to 8 experts, combined in 16 bits, GB/s of "logical"
# bandwidth: a token counts once for each node that it reaches, its own too
@pytest.mark.parametrize(
    ("device", "ranks", "published"), [("h100-sxm-80gb", 16, 81), ("b200-180gb", 16, 91), ("h100-sxm-80gb", 32, 61)]
)
def test_tokens_cross_the_network_once_a_node_as_fast_as_deepep_measured(device, ranks, published):
    size, nodes = 8192 * 7168 * 2, ranks // 8
    seconds = topology_of(gpu(device), "measured", None, None, None).exchange_once(size, 8, ranks)
    reached = nodes * (1 - (1 - 1 / nodes) ** 8)
    assert size * reached / seconds / 1e9 == pytest.approx(published, rel=0.17)


def test_within_a_node_the_exchange_is_near_deepeps_own_kernel():
    """The combine of the measured table, 16 bits; within 20 % although the formula is a plain all-to-all of fewer bytes."""
    for tokens, hidden in ((4096, 2048), (8192, 7168)):
        mine = topology_of(H100, "measured", None, None, None).exchange_once(2 * tokens * hidden, 8, 8)
        table = kernel_times(H100).expert_exchange("combine", tokens=tokens, hidden=hidden, top_k=8, ranks=8)
        assert mine == pytest.approx(float(table), rel=0.2)
