"""The bytes of collectives against those that PyTorch's own programs issue on fake and gloo process groups."""

from contextlib import contextmanager

import pytest

from calc.communication import CommunicationPlan, collectives_of
from calc.communication.collectives import _activation
from calc.model.config import from_config
from calc.training.pipeline_stages import stages

pytestmark = pytest.mark.torch

LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
QWEN3_MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}


WHOLE = {  # operator: kind, and where the whole tensor is among its arguments
    "c10d._allgather_base_": ("all_gather", 0),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d.allreduce_": ("all_reduce", 0),
    "c10d.alltoall_base_": ("all_to_all", 1),
    "_c10d_functional.all_reduce": ("all_reduce", 0),
    "_c10d_functional.all_reduce_": ("all_reduce", 0),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", None),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional.all_to_all_single": ("all_to_all", 0),
}


def predicted(config, **plan):
    """Bytes and calls of one step by kind, on the only pipeline stage."""
    spec, plan = from_config(config), CommunicationPlan(**plan)
    (stage,) = stages(plan, spec)
    found = {}
    for each in collectives_of(spec, plan, stage):
        size, calls = found.get(each.kind, (0, 0))
        found[each.kind] = (size + each.total_bytes, calls + each.calls)
    return found


def recorder():
    """A dispatch mode that notes kind and bytes of every collective: the whole tensor, as the product's convention has it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.found = {}

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            result = function(*arguments, **(keywords or {}))
            name = str(function).removesuffix(".default")
            if name in WHOLE:
                kind, place = WHOLE[name]
                tensor = result if place is None else arguments[place]
                tensor = tensor[0] if isinstance(tensor, (list, tuple)) else tensor
                size, calls = self.found.get(kind, (0, 0))
                self.found[kind] = (size + tensor.numel() * tensor.element_size(), calls + 1)
            elif name.startswith(("c10d.", "_c10d_functional.")) and "wait" not in name and "wrap" not in name:
                raise AssertionError(f"{name} is not recorded")
            return result

    return Recorder()


@contextmanager
def fake_ranks(count):
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("config", [LLAMA, QWEN3_MOE], ids=["llama", "qwen3-moe"])
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
def test_fsdp2_gathers_and_scatters_the_predicted_bytes(config, reshard):
    """fully_shard on every layer and the root, as transformers users write it: two micro-batches on 8 ranks."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from measure.trace import TraceOptions
    from measure.trace.cuda import cuda_choices
    from measure.trace.model import build, find_stack, materialize, quiet
    from measure.trace.sharding import process_group, shard

    options = TraceOptions(
        seq=64, layers=0, dp=8, zero=3, recipe="fsdp-bf16", reshard_after_forward=reshard, accumulation=2
    )
    with quiet(), cuda_choices():
        model = build(config, options)
        with process_group(8) as mesh, FakeTensorMode():
            materialize(model)
            shard(model, find_stack(model, 0), mesh, options)
            tokens = torch.zeros((1, 64), dtype=torch.int64)
            record = recorder()
            with record:
                for _ in range(2):
                    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    expected = predicted(
        config, seq=64, dp=8, zero=3, recipe="fsdp-bf16", global_batch=16, reshard_after_forward=reshard
    )
    assert {kind: record.found[kind] for kind in ("all_gather", "reduce_scatter")} == {
        kind: expected[kind] for kind in ("all_gather", "reduce_scatter")
    }


def test_ddp_reduces_the_predicted_bytes():
    """What the reducer hands to its communication hook, bucket by bucket, on a gloo group of one process."""
    import torch
    import torch.distributed as dist
    import transformers
    from torch.nn.parallel import DistributedDataParallel

    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"})
    )
    seen = []

    def hook(state, bucket):
        seen.append(bucket.buffer().numel() * bucket.buffer().element_size())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(model)
        parallel.register_comm_hook(None, hook)
        tokens = torch.zeros((1, 16), dtype=torch.int64)
        parallel(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    finally:
        dist.destroy_process_group()
    assert sum(seen) == predicted(LLAMA, seq=16, dp=2, recipe="fp32")["all_reduce"][0]


@pytest.mark.parametrize("divided", [False, True], ids=["all-reduce", "sequence parallel"])
def test_dtensor_tensor_parallel_blocks_exchange_the_predicted_bytes(divided):
    """A column- and a row-parallel projection around an activation: what every attention and MLP is to tensor parallelism."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ranks, seq, hidden = 4, 32, LLAMA["hidden_size"]
    with fake_ranks(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        block = torch.nn.Sequential(
            torch.nn.Linear(hidden, 512, bias=False), torch.nn.SiLU(), torch.nn.Linear(512, hidden, bias=False)
        )
        layout = Shard(1) if divided else Replicate()
        parallelize_module(
            block,
            mesh,
            {"0": ColwiseParallel(input_layouts=layout), "2": RowwiseParallel(output_layouts=layout)},
        )
        entry = torch.randn(1, seq // ranks if divided else seq, hidden, requires_grad=True)
        record = recorder()
        with record:
            block(entry).sum().backward()
    spec, plan = from_config(LLAMA), CommunicationPlan(seq=seq, tp=ranks, recipe="fp32", sequence_parallel=divided)
    (stage,) = stages(plan, spec)
    blocks = 2 * LLAMA["num_hidden_layers"]
    expected = {}
    for each in collectives_of(spec, plan, stage):
        if "tensor parallel" in each.name:
            size, calls = expected.get(each.kind, (0, 0))
            expected[each.kind] = (size + each.total_bytes // blocks, calls + each.calls // blocks)
    assert record.found == expected


def test_experts_exchange_the_predicted_bytes():
    """Dispatch and combine of one layer by all-to-all, tokens spread evenly, with their backwards."""
    import torch
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    ranks, seq = 4, 32
    with fake_ranks(ranks):
        rows = seq * QWEN3_MOE["num_experts_per_tok"]
        tokens = torch.randn(rows, QWEN3_MOE["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
        split = [rows // ranks] * ranks
        record = recorder()
        with record:
            arrived = all_to_all_single_autograd(tokens, split, split, dist.group.WORLD)
            all_to_all_single_autograd(arrived * 2, split, split, dist.group.WORLD).sum().backward()
    expected = predicted(QWEN3_MOE, seq=seq, dp=ranks, ep=ranks)["all_to_all"]
    layers = QWEN3_MOE["num_hidden_layers"]
    assert record.found["all_to_all"] == (expected[0] // layers, expected[1] // layers)


def shared(ranks, seq, heads):
    """One rank's part of a tensor of heads, in 16 bits."""
    import torch

    width = LLAMA["hidden_size"] // LLAMA["num_attention_heads"]
    return torch.randn(1, heads, seq // ranks, width, dtype=torch.bfloat16, requires_grad=True)


def of_one_layer(**plan):
    found = predicted(LLAMA, **plan)
    return {kind: (size // LLAMA["num_hidden_layers"], calls) for kind, (size, calls) in found.items()}


def test_gathered_keys_and_values_are_the_predicted_bytes():
    """Llama 3's context parallelism by DTensor: keys and values are gathered, their partial gradients reduced and scattered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    ranks, seq = 4, 64
    with fake_ranks(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        both = [DTensor.from_local(shared(ranks, seq, LLAMA["num_key_value_heads"]), mesh, [Shard(2)]) for _ in "kv"]
        record = recorder()
        with record:
            for each in both:
                whole = each.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
                whole.sum().backward()
    found = of_one_layer(seq=seq, cp=ranks, context_exchange="all-gather")
    dp = predicted(LLAMA, seq=seq, dp=1, cp=ranks, context_exchange="all-gather")
    assert record.found["all_gather"][0] == found["all_gather"][0]
    assert record.found["reduce_scatter"][0] == found["reduce_scatter"][0]
    assert set(dp) == {"all_gather", "reduce_scatter", "all_reduce"}  # and the gradients, which cp's ranks share


def test_heads_exchanged_for_sequence_are_the_predicted_bytes():
    """Ulysses: queries, keys, values and outputs change from a part of the sequence to a part of the heads, and back in the backward."""
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    ranks, seq = 4, 64
    heads = (*(LLAMA["num_attention_heads"],) * 2, *(LLAMA["num_key_value_heads"],) * 2)
    with fake_ranks(ranks):
        record = recorder()
        with record:
            for count in heads:
                rows = shared(ranks, seq, count).transpose(0, 1).contiguous()
                all_to_all_single_autograd(
                    rows, [count // ranks] * ranks, [count // ranks] * ranks, dist.group.WORLD
                ).sum().backward()
    found = of_one_layer(seq=seq, cp=ranks, context_exchange="all-to-all")
    assert record.found["all_to_all"][0] == found["all_to_all"][0]


@pytest.mark.parametrize(
    ("rotate", "how", "program"),
    [("alltoall", "ring", {}), ("allgather", "all-gather", {"implementation": "torchtitan", "recipe": "fsdp-bf16", "zero": 3})],
)  # fmt: skip
def test_context_exchanges_are_those_of_pytorchs_ring_attention(rotate, how, program):
    """torch.distributed's own ring, forward and backward, around kernels that only give tensors of the right shape; its all-gather,
    torchtitan's default, gathers in both directions and still passes the gradients on."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.experimental._context_parallel import _attention

    ranks, seq = 4, 64

    def forward(query, key, value, **rest):
        return torch.zeros_like(query), torch.zeros(query.shape[:-1]), *rest.values()

    def backward(query, key, value, **rest):
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    before = _attention._cp_options.rotate_method
    _attention.set_rotate_method(rotate)
    try:
        with fake_ranks(ranks), torch.no_grad():
            query, key, value = (
                shared(ranks, seq, LLAMA[f"num_{each}_heads"]) for each in ("attention", *["key_value"] * 2)
            )
            record = recorder()
            with record:
                group = dist.group.WORLD
                out, lse, *_ = _attention._templated_ring_attention(
                    group, 2, forward, query, key, value, is_causal=True
                )
                _attention._templated_ring_attention_backward(
                    group, 2, backward, out, "grad_out", query, key, value, out, lse, is_causal=True
                )
    finally:
        _attention._cp_options.rotate_method = before
    spec, plan = from_config(LLAMA), CommunicationPlan(seq=seq, cp=ranks, context_exchange=how, **program)
    (stage,) = stages(plan, spec)
    found, layers = {}, LLAMA["num_hidden_layers"]
    for each in collectives_of(spec, plan, stage):
        if each.group.name == "cp":
            kind = "all_to_all" if each.kind == "send" else each.kind  # a permutation, as an all-to-all of one part
            size, calls = found.get(kind, (0, 0))
            found[kind] = (size + each.total_bytes // layers, calls + each.calls // layers)
    assert record.found == found


def test_a_hidden_state_between_stages_is_what_the_next_stage_reads():
    spec, plan = from_config(LLAMA), CommunicationPlan(seq=64, pp=3, micro_batch=2, global_batch=8)
    middle = stages(plan, spec)[1]
    sends = [each for each in collectives_of(spec, plan, middle) if each.kind == "send"]
    assert {each.bytes for each in sends} == {2 * 64 * 256 * 2} == {_activation(spec, plan)}
    assert [each.calls for each in sends] == [4, 4]
