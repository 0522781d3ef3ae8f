"""Parameter, gradient and optimizer bytes of a real decoder after two AdamW steps, predicted against measured, by path.

Predicted from the config by calc alone; measured by summing the storages of the tensors that transformers and torch made. On
a GPU the allocator's own count is compared too (that part has not run on a GPU yet).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from calc.breakdown import Breakdown, Component, Formula
from calc.measurements.records import Measured
from calc.model.config import from_config
from calc.parameters import parameters
from calc.training.states.sharding import GRANULE, rules
from calc.units import round_up
from measure.setting import Setting
from measure.workloads.cases import paired

_STEPS: Final = 2
_MOMENTS: Final = {"exp_avg": "moment_1", "exp_avg_sq": "moment_2"}  # torch's names and the ledger's


@dataclass(frozen=True, slots=True)
class Size:
    """A Llama small enough to build anywhere. GQA, an untied head and an intermediate size off the powers of two, to be no special case."""

    config: Mapping[str, Any]
    batch: int
    seq: int


def _size(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, batch: int, seq: int
) -> Size:
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }
    return Size(config, batch, seq)


SIZES: Final = {
    "small": _size(256, 696, 4, 8, 2, 4099, batch=2, seq=33),
    "medium": _size(1024, 2744, 8, 16, 4, 32003, batch=2, seq=65),
}
# recipe of the ledger, what the weights are stored in, whether autocast computes in bf16
RECIPES: Final = (("fp32", torch.float32, False), ("amp", torch.float32, True), ("pure-bf16", torch.bfloat16, False))

# where transformers keeps each weight, and its path in a breakdown
_PATHS: Final = {
    "model.embed_tokens.weight": "embedding/token",
    "self_attn.q_proj.weight": "layers/attention/query",
    "self_attn.k_proj.weight": "layers/attention/key",
    "self_attn.v_proj.weight": "layers/attention/value",
    "self_attn.o_proj.weight": "layers/attention/output",
    "mlp.gate_proj.weight": "layers/mlp/gate",
    "mlp.up_proj.weight": "layers/mlp/up",
    "mlp.down_proj.weight": "layers/mlp/down",
    "input_layernorm.weight": "layers/norms/input_norm",
    "post_attention_layernorm.weight": "layers/norms/post_attention_norm",
    "model.norm.weight": "final_norm/weight",
    "lm_head.weight": "head/weight",
}


def run(setting: Setting) -> Iterator[Measured]:
    """One breakdown for each recipe: `parameters/...`, `gradients/...`, `optimizer/...` and their total, in bytes."""
    size = SIZES[setting.size]
    for index, (recipe, dtype, autocast) in enumerate(RECIPES):
        case, start = f"{setting.size}, {recipe}", index / len(RECIPES)
        setting.tell(start, f"building the {setting.size} decoder in {recipe}")
        before = _allocated(setting.device.name)
        trained = _trained(size, dtype, autocast, setting, start)
        predicted = predict(size.config, recipe)
        for row in paired(predicted, observe(*trained)):
            yield row._replace(case=case)
        if before is not None:
            yield _allocator_row(case, predicted, before, setting.device.name)
        del trained  # before the next recipe is built


def predict(config: Mapping[str, Any], recipe: str) -> Breakdown:
    """The states by formula: every weight once for each state of the recipe's ledger, and one fp32 step counter a tensor."""
    tree = parameters(from_config(config)).breakdown
    tensors = sum(row.copies for row in tree.rows())
    steps = Component("step", 4 * tensors, formula=_STEP_COUNTERS, numbers={"tensors": tensors})
    found: dict[str, list[Component]] = {}
    for rule in rules(recipe, "adamw"):
        name = rule.name if rule.group == "optimizer" else rule.group
        found.setdefault(rule.group, []).append(_scaled(tree.root, name, rule.bytes))
    (weights,), (gradients,), moments = found["parameters"], found["gradients"], found["optimizer"]
    return Breakdown(
        Component("", children=(weights, gradients, Component("optimizer", children=(*moments, steps)))), "bytes"
    )


_STEP_COUNTERS: Final = Formula(
    r"4 \cdot <tensors>",
    "PyTorch 2.13, torch/optim/adam.py: one fp32 counter for each tensor, on the host unless fused",
)


def _scaled(part: Component, name: str, width: int) -> Component:
    """The tree of parameter counts as bytes, `width` for each parameter."""
    if part.children:
        return Component(
            name, children=tuple(_scaled(child, child.name, width) for child in part.children), count=part.count
        )
    assert part.formula is not None
    formula = replace(part.formula, latex=rf"<bytes> \cdot {part.formula.latex}")
    return Component(
        name, int(part.value) * width, count=part.count, formula=formula, numbers={**part.numbers, "bytes": width}
    )


def observe(model: nn.Module, optimizer: torch.optim.Optimizer) -> Breakdown:
    """The same paths from the real tensors: the bytes of their storages, each storage once, whatever shares it."""
    seen: set[tuple[torch.device, int]] = set()
    found: dict[str, int] = {}

    def count(path: str, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place = (storage.device, storage.data_ptr())
        if place not in seen:
            seen.add(place)
            found[path] = found.get(path, 0) + storage.nbytes()

    for name, parameter in model.named_parameters():
        path = _path(name)
        count(f"parameters/{path}", parameter)
        if parameter.grad is not None:
            count(f"gradients/{path}", parameter.grad)
        for key, value in optimizer.state[parameter].items():
            count(f"optimizer/{_MOMENTS[key]}/{path}" if key in _MOMENTS else f"optimizer/{key}", value)
    return Breakdown(Component("", children=tuple(Component(path, total) for path, total in found.items())), "bytes")


def _path(name: str) -> str:
    """The path of a weight by its name in transformers; one that the table lacks stays visible under `other`."""
    inner = name.split(".", 3)[-1] if name.startswith("model.layers.") else name
    return _PATHS.get(inner, f"other/{inner}")


def _trained(
    size: Size, dtype: torch.dtype, autocast: bool, setting: Setting, start: float
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The decoder and its optimizer after two steps, gradients still there."""
    torch.manual_seed(0)
    device = torch.device(setting.device.name)
    with device:
        model = LlamaForCausalLM(LlamaConfig(**size.config, use_cache=False))
        model.to(dtype=dtype).train()  # type: ignore[call-arg]
        tokens = torch.randint(0, size.config["vocab_size"], (size.batch, size.seq))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(_STEPS):
        setting.tell(start + (step + 1) / (_STEPS + 1) / len(RECIPES), f"step {step + 1} of {_STEPS}")
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
    return model, optimizer


def _allocated(device: str) -> int | None:
    """Bytes that torch's allocator has given out on a GPU, cuBLAS's workspace returned first; None on the CPU, which has no such count."""
    if not device.startswith("cuda"):
        return None
    gc.collect()  # a model is full of reference cycles; what the last recipe left must not count
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated(device)


def _allocator_row(case: str, predicted: Breakdown, before: int, device: str) -> Measured:
    """The allocator's count of the states, its granules counted. What it holds beyond them (rotary tables, a large block that was not
    split) shows as error."""
    expected = sum(rounded(predicted))
    after = _allocated(device)
    return Measured(case, "allocated by torch", expected, None if after is None else after - before, "bytes")


def rounded(predicted: Breakdown) -> Iterator[int]:
    """Bytes of each leaf with every tensor rounded up to the allocator's granule; step counters live on the host."""
    for row in predicted.rows():
        if row.path != "optimizer/step":
            yield row.copies * round_up(int(row.value) // row.copies, GRANULE)
