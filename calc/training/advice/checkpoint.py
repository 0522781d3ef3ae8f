"""Bytes of a checkpoint on disk, and the host memory that loading it takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

from calc.breakdown import Breakdown, Component, Formula
from calc.model.spec import ModelSpec
from calc.training.advice.largest import changed
from calc.training.deepspeed.stage import SETTINGS
from calc.training.pipeline_stages import stages
from calc.training.plan import TrainingPlan
from calc.training.states.sharding import Placed, StateKey, state_components
from calc.training.states.stage_tensors import groups_of
from calc.training.states.tensors import Tensors

_SAVED: Final = ("parameters", "optimizer")
NODE = 8  # GPUs of one node, each with its own process

_ONE_DEVICE: Final = {
    "dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp_replicate": 1, "zero": 0, "virtual_stages": 1,
    "sequence_parallel": None, "global_batch": None, "offload": "none", "nvme": False,
}  # fmt: skip
_ALONE: Final = {  # which need ranks; their states are the same
    "torchtitan": {"implementation": "hf", "recompute": "none", "root_group": False},
    "deepspeed": {"implementation": "hf", **dict.fromkeys(SETTINGS)},
}
_SAVED_AS: Final = {"fp8": "megatron-bf16"}  # its 8-bit copies are made again from the weights

DISK = Formula(
    "<w> + <o>",
    "PyTorch, Saving and loading a general checkpoint: the state_dict of the model and of the optimizer",
    "https://docs.pytorch.org/tutorials/recipes/recipes/saving_and_loading_a_general_checkpoint.html",
    (
        "w: weights in the recipe's format, once (shards of all ranks together); o: optimizer state, master weights included",
        "gradients, buffers, random states and the step counters (4 bytes a tensor) are not counted",
    ),
)
HOST = Formula(
    r"<n> \cdot <r>",
    "PyTorch, torch.load: map_location 'cpu' puts the whole state_dict into host memory before it goes to the GPU",
    "https://docs.pytorch.org/docs/2.13/generated/torch.load.html",
    ("n: processes of one node, at most 8; r: the checkpoint, and frozen weights that come from their own file",),
)
HOST_SHARDS = Formula(
    HOST.latex,
    "PyTorch, torch.distributed.checkpoint.load: each rank only reads data for its local shards",
    "https://docs.pytorch.org/docs/2.13/distributed.checkpoint.html",
    (
        "n: processes of one node, at most 8; r: weights and optimizer state of one rank, on the stage that has most",
        "the shards of a rank lie in host memory at once: copied to the GPU one by one, they need less",
    ),
)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Exact bytes. With LoRA it holds the adapters alone, and `frozen_bytes` are those of the model that they need.

    `shard_bytes` is what one rank loads of it where each loads its shards alone, None where every process loads all of it.
    """

    breakdown: Breakdown  # parameters and optimizer, tensor by tensor
    frozen_bytes: int
    processes: int  # of one node
    shard_bytes: int | None

    @cached_property
    def weights_bytes(self) -> int:
        """A checkpoint of the weights alone."""
        return self._part("parameters")

    @cached_property
    def optimizer_bytes(self) -> int:
        return self._part("optimizer")

    @property
    def bytes(self) -> int:
        """A checkpoint to go on training from: weights and optimizer state."""
        return self.weights_bytes + self.optimizer_bytes

    @property
    def loaded_bytes(self) -> int:
        """What one process loads to the CPU first."""
        return self.bytes + self.frozen_bytes if self.shard_bytes is None else self.shard_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory to resume: of one node, while its processes load the checkpoint. No step needs it."""
        return self.processes * self.loaded_bytes

    @property
    def host_formula(self) -> Formula:
        """How `host_bytes` comes about, by the way of loading."""
        return HOST if self.shard_bytes is None else HOST_SHARDS

    @property
    def numbers(self) -> dict[str, int]:
        """The letters of `DISK` and of `host_formula`."""
        return {
            "w": self.weights_bytes,
            "o": self.optimizer_bytes,
            "n": self.processes,
            "r": self.loaded_bytes,
        }

    def _part(self, name: str) -> int:
        return int(sum(part.total for part in self.breakdown.root.children if part.name == name))

    def as_json(self) -> dict[str, Any]:
        return {
            "weights_bytes": self.weights_bytes,
            "optimizer_bytes": self.optimizer_bytes,
            "bytes": self.bytes,
            "frozen_bytes": self.frozen_bytes,
            "host_bytes": self.host_bytes,
            "formula": DISK.symbolic(),
            "source": DISK.source,
            "host_formula": self.host_formula.symbolic(),
            "host_source": self.host_formula.source,
            "assumes": [*DISK.assumes, *self.host_formula.assumes],
        }


def checkpoint(spec: ModelSpec, plan: TrainingPlan) -> Checkpoint:
    """What a checkpoint of this training holds, whatever the layout: the states of the whole model, once."""
    recipe = _SAVED_AS.get(plan.recipe, plan.recipe)
    whole = changed(plan, {**_ONE_DEVICE, **_ALONE.get(plan.implementation, {}), "recipe": recipe})
    groups = groups_of(whole, spec, stages(whole, spec)[0])
    key = StateKey.of(whole)._replace(granule=1, counters=False)
    frozen = 0
    if plan.lora:
        everything = _weights(groups, key)
        groups = tuple((_adapters(tensors), count) for tensors, count in groups)
        frozen = everything - _weights(groups, key)
    root = Component("", children=state_components(groups, key, _SAVED))
    return Checkpoint(Breakdown(root, "bytes"), frozen, min(NODE, plan.gpus), _shard(spec, plan, recipe))


def _shard(spec: ModelSpec, plan: TrainingPlan, recipe: str) -> int | None:
    """What a rank loads of a checkpoint that is saved in shards; None where the plan's trainer saves one file."""
    if plan.implementation not in ("torchtitan", "fused") and plan.zero < 3:
        return None
    placed = changed(plan, {"recipe": recipe, "offload": "none", "nvme": False})
    key = StateKey.of(placed)._replace(granule=1, counters=False)
    ranks = (state_components(groups_of(placed, spec, stage), key, _SAVED) for stage in stages(placed, spec))
    return max(int(sum(part.total for part in parts)) for parts in ranks)


def _weights(groups: tuple[Placed, ...], key: StateKey) -> int:
    return int(sum(part.total for part in state_components(groups, key, ("parameters",))))


@lru_cache(maxsize=256)
def _adapters(tensors: Tensors) -> Tensors:
    """The adapters of a group. Cached: a group hashes by identity, and so do the caches behind it."""
    return Tensors(tensors.path, tuple(tensor for tensor in tensors.tensors if tensor.adapter))
