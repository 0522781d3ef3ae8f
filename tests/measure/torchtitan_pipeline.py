"""A pipeline stage of torchtitan's structure, run by PyTorch's own PipelineStage and Schedule1F1B with fake tensors."""

from __future__ import annotations

import contextlib
import gc
import warnings
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.stage import InferenceMode

from measure.trace.cuda import cuda_choices
from measure.trace.sharding import process_group
from tests.measure.torchtitan_program import Block, Norm, Shape, _live, _loss, _Recorder


class Part(nn.Module):
    """Some layers, after the embedding on the first stage, before norm and head on the last."""

    def __init__(self, shape: Shape, longest: int, layers: int, first: bool, last: bool):
        super().__init__()
        self.register_buffer("table", torch.empty((longest, shape.head // 2), dtype=torch.complex64))
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden) if first else None
        self.layers = nn.ModuleList(Block(shape, index) for index in range(layers))
        self.norm = Norm(shape.hidden) if last else None
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False) if last else None

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, self.table)
        if self.head is not None:
            x = self.norm(x)
            x = self.head(x)
        return x


def _sharded(part, mesh, recompute):
    for index, block in enumerate(part.layers):
        if recompute:
            part.layers[index] = checkpoint_wrapper(block, preserve_rng_state=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": False}
    for module in (*([part.embedding] if part.embedding is not None else []), *part.layers):
        fully_shard(module, **options)
    if part.head is not None:
        fully_shard([part.norm, part.head], **options)
    fully_shard(part, **options)


def _stage(part, shape, place, stages, tokens, group):
    """The stage, told what passes between it and its neighbours, which others would tell it."""

    def passing(width):
        return torch.zeros((1, tokens, width), dtype=torch.bfloat16, requires_grad=True)

    first, last = place == 0, place == stages - 1
    given = torch.zeros((1, tokens), dtype=torch.int64) if first else passing(shape.hidden)
    gradients = {} if last else {"output_grads": (passing(shape.hidden),)}
    gradients |= {} if first else {"input_grads": (passing(shape.hidden),)}
    out = passing(shape.vocabulary if last else shape.hidden)
    made = PipelineStage(
        part, place, stages, torch.device("cpu"), input_args=(given,), output_args=(out,), group=group, **gradients
    )
    made._inference_mode = InferenceMode.STATIC
    return made


def peak(
    shape: Shape, layers: tuple[int, ...], place: int, tokens: int, micro: int, shards: int, recompute: bool
) -> int:
    """The highest point of the second step of one stage; the layers of each stage; one sequence in a micro-batch."""
    recorder, stages = _Recorder({}, 512, False), len(layers)
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stack.enter_context(cuda_choices())
        stack.enter_context(process_group(shards * stages))
        stack.enter_context(mock.patch.object(Schedule1F1B, "_warmup_p2p"))  # no neighbour answers
        mesh = init_device_mesh("cpu", (stages, shards), mesh_dim_names=("pp", "shards"))
        first, last = place == 0, place == stages - 1
        with torch.device("meta"):
            part = Part(shape, tokens, layers[place], first, last)
        _sharded(part, mesh["shards"], recompute)
        contexts = (FakeTensorMode(allow_non_fake_inputs=True), recorder, recorder.resizes(), recorder.looking_away())
        for context in contexts:
            stack.enter_context(context)
        part.to_empty(device="cpu")
        optimizer = torch.optim.AdamW(part.parameters(), fused=True)
        ids, labels = (torch.zeros((micro, tokens), dtype=torch.int64) for _ in range(2))
        stage = _stage(part, shape, place, stages, tokens, mesh.get_group("pp"))
        schedule = Schedule1F1B(stage, n_microbatches=micro, loss_fn=_loss, scale_grads=False)
        for _ in range(2):
            optimizer.zero_grad()
            gc.collect()
            total, start = _live(recorder), len(recorder.events)
            targets = {"target": labels, "losses": []} if last else {}
            schedule.step(*([ids] if first else []), return_outputs=False, **targets)
            optimizer.step()
        highest = total
        for event in recorder.events[start:]:
            total += event.sign * event.storage.nbytes
            highest = max(highest, total)
    return highest
