"""What loading a model for QLoRA takes: its linear layers quantised, and the rest in 16 bits, or in fp32 once it is prepared."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from calc.model.spec import ModelSpec
from calc.training.pipeline_stages import stages
from calc.training.plan import TrainingPlan
from calc.training.states.sharding import StateKey, group_bytes
from calc.training.states.stage_tensors import groups_of
from calc.training.states.tensors import Tensors

NOTES: Final = (
    "qlora: embeddings, head, norms, biases, routers and stacked experts are not quantised (transformers)",
    "qlora: with recipe pure-bf16 these stay as loaded, in bf16; with amp they are fp32, as peft's prepare_model_for_kbit_training "
    "casts them",
    "qlora: one dequantised 16-bit copy of a weight is alive at a time, in forward and in backward",
)


def loading(plan: TrainingPlan, spec: ModelSpec) -> dict[str, int]:
    """Bytes of the whole model without adapters: `loaded` (what is not quantised in bf16), `prepared` (in fp32), and `peak`.

    `peak` is the more of two: loading, where the largest weight is there in 16 bits too, from which its NF4 is made, and
    what is there once prepared. Empty but for QLoRA.
    """
    if plan.method != "qlora":
        return {}
    whole = TrainingPlan(
        method="qlora", lora_rank=plan.lora_rank, lora_targets=plan.lora_targets, quantization=plan.quantization
    )
    groups = [(_base(tensors), count) for tensors, count in groups_of(whole, spec, stages(whole, spec)[0])]
    keys = [StateKey.of(whole)._replace(granule=1, recipe=recipe) for recipe in ("pure-bf16", "amp")]
    loaded, prepared = (sum(count * group_bytes(found, key).parameters for found, count in groups) for key in keys)
    largest = max((tensor.elements for found, _ in groups for tensor in found.tensors if tensor.quantised), default=0)
    made_here = 2 * largest if plan.quantization != "gptq-int4" else 0  # GPTQ's checkpoint is quantised already
    return {"loaded": loaded, "prepared": prepared, "peak": max(loaded + made_here, prepared)}


@lru_cache(maxsize=256)
def _base(tensors: Tensors) -> Tensors:
    """The group without adapters and trained copies. Cached: a group hashes by identity."""
    return Tensors(tensors.path, tuple(tensor for tensor in tensors.tensors if not (tensor.adapter or tensor.saved)))
