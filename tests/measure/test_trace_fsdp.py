"""FSDP2 and ZeroRedundancyOptimizer under the trace: against PyTorch's own tracker, and against itself run whole."""

import pytest

from measure.trace import TraceOptions, trace_step

pytestmark = pytest.mark.torch

SMALL = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LLAMA = {"model_type": "llama", **SMALL}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    **SMALL,
    "num_hidden_layers": 7,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "mlp_only_layers": [0, 1],
}


def sharded(config, **options):
    return trace_step(config, TraceOptions(**{"seq": 64, "dp": 8, "zero": 3, "recipe": "fsdp-bf16", **options}))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reshard", [True, False])
def test_the_sharded_peak_is_that_of_pytorchs_own_tracker(reshard):
    """torch.distributed's FSDPMemTracker, run over the same step, sees the same bytes to the last one."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    from measure.trace.cuda import cuda_choices
    from measure.trace.model import build, find_stack, materialize, quiet
    from measure.trace.sharding import process_group, shard

    options = TraceOptions(
        seq=64, rounding=1, layers=0, dp=8, zero=3, recipe="fsdp-bf16", reshard_after_forward=reshard
    )
    result = trace_step(LLAMA, options)
    with quiet(), cuda_choices():
        model = build(LLAMA, options)
        with process_group(8) as mesh, FakeTensorMode():
            materialize(model)
            shard(model, find_stack(model, 0), mesh, options)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
            tokens = torch.zeros((1, 64), dtype=torch.int64)
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((tokens,))
            with tracker:
                for _ in range(2):
                    optimizer.zero_grad()
                    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
                    optimizer.step()
                    tracker.reset_mod_stats()
                peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    counters = 4 * len(list(model.parameters()))  # AdamW's step counters, which live on the host
    assert peak["Total"] == result.peak_bytes + counters


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (LLAMA, {"reshard_after_forward": False, "accumulation": 2}),
        (LLAMA, {"recompute": "full"}),
        (QWEN3_MOE, {}),
    ],
)
def test_layers_laid_together_are_the_sharded_model_run_whole(config, options):
    short, whole = sharded(config, **options), sharded(config, layers=0, **options)
    assert short.layers_run < short.layers == whole.layers_run
    assert dict(short.phases) == dict(whole.phases)
    assert dict(short.alive) == dict(whole.alive)
    assert short.activations_bytes == whole.activations_bytes


def test_zero_1_keeps_on_rank_0_what_it_is_given_tensor_by_tensor():
    """ZeroRedundancyOptimizer hands out whole tensors, largest first, each to the rank with least."""
    result = sharded(LLAMA, zero=1, recipe="pure-bf16", rounding=1)
    q, kv, h, mlp, vocabulary = 256 * 256, 128 * 256, 256, 512 * 256, 1000 * 256
    tensors = 5 * [q, q, kv, kv, mlp, mlp, mlp, h, h] + [vocabulary, vocabulary, h]
    ranks = [0] * 8
    for tensor in sorted(tensors, reverse=True):
        ranks[ranks.index(min(ranks))] += tensor
    assert result.optimizer_bytes == 2 * 2 * ranks[0]
    assert result.parameters_bytes == result.gradients_bytes == 2 * sum(tensors)
