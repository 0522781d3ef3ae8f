"""torchtitan's layer and loss traced by torch.compile on the CPU and cut by Inductor's partitioner: what forward keeps for backward."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.measure import torchtitan_program as titan
from tests.measure.torchtune_program import Layer

# The CPU's flash attention goes by another name than CUDA's, and keeps the same.
KEPT = titan.KEPT | {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}


class _Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = (size,)
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.rms_norm(x, self.size, self.weight, 1e-5)


def _kept(function, *inputs) -> int:
    """Bytes of the activations among forward's results: no weights, no tables, each storage once."""
    graphs = []

    def compiler(graph, _):
        graphs.append(graph)
        return graph

    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(function, backend=backend, fullgraph=True)(*inputs).sum().backward()
    forward = graphs[0]
    (results,) = next(node for node in forward.graph.nodes if node.op == "output").args
    found = {}
    tokens = inputs[0].shape[0] * inputs[0].shape[1]  # weights and tables are smaller, or given
    for node in results[1:]:
        if node is None or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        value = node.meta["val"]
        given = node.op == "placeholder"
        if value.shape == inputs[0].shape if given else value.is_floating_point() and value.numel() >= tokens:
            found[_source(node)] = value.numel() * value.element_size()
    return sum(found.values())


def _source(node):
    """The node whose memory a view shows."""
    views = ("view", "permute", "alias", "reshape", "transpose", "_unsafe_view", "expand")
    while node.op == "call_function" and str(node.target).split(".")[1:2] and str(node.target).split(".")[1] in views:
        node = node.args[0]
    return node


def kept_by_layer(shape: titan.Shape, batch: int, tokens: int, recompute: str) -> int:
    """A layer's, its input included."""
    norm, kept = titan.Norm, titan.KEPT
    titan.Norm, titan.KEPT = _Norm, KEPT
    try:
        layer: nn.Module = titan.Block(shape, 0).bfloat16()
        if recompute != "none":
            chosen = {"context_fn": titan._selected} if recompute == "selective" else {}
            layer = checkpoint_wrapper(layer, preserve_rng_state=False, **chosen)
        x = torch.randn(batch, tokens, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
        if shape.cosines:
            table = torch.randn(tokens, 2 * shape.head, dtype=torch.bfloat16)
        else:
            table = torch.polar(torch.ones(tokens, shape.head // 2), torch.randn(tokens, shape.head // 2))
        return _kept(layer, x, table)
    finally:
        titan.Norm, titan.KEPT = norm, kept


def kept_by_torchtune(shape: tuple[int, ...], batch: int, tokens: int, recompute: bool) -> int:
    """A layer of torchtune's, its input included; `shape` as its class has it."""
    layer: nn.Module = Layer(*shape).bfloat16()
    layer = checkpoint_wrapper(layer, preserve_rng_state=False) if recompute else layer
    x = torch.randn(batch, tokens, shape[0], dtype=torch.bfloat16, requires_grad=True)
    return _kept(layer, x, torch.randn(tokens, shape[-1] // 2, 2))


def kept_by_loss(batch: int, tokens: int, vocabulary: int) -> int:
    """The loss's, the logits included, and the number of tokens that it divides by."""

    def loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))

    logits = torch.randn(batch, tokens, vocabulary, dtype=torch.bfloat16, requires_grad=True)
    return _kept(loss, logits, torch.zeros(batch, tokens, dtype=torch.int64)) + 4
