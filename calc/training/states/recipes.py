"""Training states as a ledger of bytes per parameter: the recipe says what is kept, the optimizer what it adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_ZERO = "ZeRO, arXiv 1910.02054, section 3.1"
_MEGATRON = "Megatron-LM, docs/user-guide/features/dist_optimizer.md"
_TORCH = "PyTorch 2.13, torch.amp and torch.optim"


@dataclass(frozen=True, slots=True)
class State:
    """One state: its bytes for each parameter, its group of the answer, and the first ZeRO stage that shards it."""

    name: str
    bytes: int
    group: str  # "parameters", "gradients" or "optimizer"
    zero: int


@dataclass(frozen=True, slots=True)
class RecipeLedger:
    """What a recipe keeps for each trained parameter besides the optimizer's moments.

    `weight` and `compute` are bytes of the stored weight and of the numbers that the layers work in; `moment` the bytes of
    one moment. `autocast`: weights stay fp32 and each matmul casts them. `gathered`: compute weights are made from the shards.
    """

    weight: int
    compute: int
    moment: int
    states: tuple[State, ...]
    source: str
    url: str
    autocast: bool = False
    gathered: bool = False
    note: str = ""


def _recipe(
    weight: int,
    compute: int,
    moment: int,
    *states: tuple[str, int, str, int],
    source: str,
    url: str = "",
    **traits: object,
) -> RecipeLedger:
    rows = (State("weight", weight, "parameters", 3), *(State(*state) for state in states))
    return RecipeLedger(weight, compute, moment, rows, source, url, **traits)  # type: ignore[arg-type]


_GRADIENT_2 = ("gradient", 2, "gradients", 2)
_GRADIENT_4 = ("gradient", 4, "gradients", 2)
_MASTER = ("master", 4, "optimizer", 1)
_ZERO_URL = "https://arxiv.org/abs/1910.02054"
_MEGATRON_URL = "https://github.com/NVIDIA/Megatron-LM/blob/main/docs/user-guide/features/dist_optimizer.md"
_AMP_URL = "https://docs.pytorch.org/docs/2.13/amp.html"

RECIPES: Final = {
    "pure-bf16": _recipe(2, 2, 2, _GRADIENT_2, source=_TORCH, url=_AMP_URL),
    "fp32": _recipe(4, 4, 4, _GRADIENT_4, source=_TORCH, url=_AMP_URL),
    "amp": _recipe(4, 2, 4, _GRADIENT_4, source=_TORCH, url=_AMP_URL, autocast=True),
    "bf16-autocast": _recipe(
        2, 2, 2, _GRADIENT_2, source=_TORCH, url=_AMP_URL, autocast=True,
        note="bf16-autocast: weights loaded in bf16 and run under torch.autocast, as transformers' Trainer does with bf16=True",
    ),
    "mixed-16": _recipe(2, 2, 4, _GRADIENT_2, _MASTER, source=_ZERO, url=_ZERO_URL),
    "megatron-bf16": _recipe(
        2, 2, 4, ("main_gradient", 4, "gradients", 2), _MASTER, source=_MEGATRON, url=_MEGATRON_URL
    ),
    # Main gradients and moments in bf16 next to fp32 master weights.
    "megatron-precision-aware": _recipe(
        2,
        2,
        2,
        ("main_gradient", 2, "gradients", 2),
        _MASTER,
        source="Megatron-LM, megatron/core/optimizer/optimizer_config.py: use_precision_aware_optimizer",
        url="https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/optimizer_config.py",
        note="megatron-precision-aware: main_grads_dtype, exp_avg_dtype and exp_avg_sq_dtype are bf16, main_params_dtype is fp32; "
        "store_param_remainders would keep 2 bytes less of each weight",
    ),
    # The fp32 copy of the gradients belongs to the distributed optimizer, hence 4 + 16/n.
    "megatron-fp16": _recipe(
        2, 2, 4, _GRADIENT_2, ("main_gradient", 4, "gradients", 1), _MASTER, source=_MEGATRON, url=_MEGATRON_URL
    ),
    "fsdp-bf16": _recipe(
        4,
        2,
        4,
        _GRADIENT_4,
        source="PyTorch 2.13, torch.distributed.fsdp.MixedPrecisionPolicy",
        url="https://docs.pytorch.org/docs/2.13/distributed.fsdp.fully_shard.html",
        gathered=True,
    ),
    "fp8": _recipe(
        2,
        2,
        4,
        ("fp8_copies", 2, "parameters", 3),
        ("main_gradient", 4, "gradients", 2),
        _MASTER,
        source="Transformer Engine, Linear with fp8 autocast: cached fp8 weight and its transpose",
        url="https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/examples/fp8_primer.html",
        note="fp8: activations are counted in 16 bits; those that Transformer Engine keeps in fp8 take less",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class OptimizerLedger:
    """What an optimizer keeps. `moments` copies of each parameter; `temporary` copies of all at the step with `foreach`.

    `block` is the size of a quantised block (moments of `bits` with one fp32 scale a block), 0 for none; tensors under `smallest`
    elements keep moments of `small` bytes. `factored`: second moments of matrices are a row and a column (Adafactor). `vectors_adamw`:
    tensors that are not hidden matrices use AdamW, and its kernels (Muon). `paged`: moments may be evicted to the host.
    """

    moments: tuple[str, ...]
    source: str
    url: str
    block: int = 0
    bits: int = 8  # of a moment in blocks
    table: int = 0  # bytes of the code's values next to each moment in blocks
    small: int = 4  # bytes of a moment of a small tensor, or one that blocks do not divide; 0: the recipe's
    smallest: int = 0
    moment: int = 0  # bytes of a moment whatever the recipe; 0: the recipe's
    factored: bool = False
    vectors_adamw: bool = False
    foreach: int = 0  # copies of a moment alive at the step, by kernel
    loop: int = 0
    bound: int = 0  # copies of the tensor before, to which a name of the loop is still bound
    counts_on_device: bool = False  # its fused kernel keeps a step counter for each tensor
    note: str = ""

    def takes(self, elements: int) -> bool:
        """Whether the moments of a tensor of so many elements lie in blocks. torchao wants whole blocks, bitsandbytes takes a short one."""
        return elements >= self.smallest and (self.small > 0 or elements % self.block == 0)


_OPTIM = "https://docs.pytorch.org/docs/2.13/generated/torch.optim"
_BNB = "https://github.com/bitsandbytes-foundation/bitsandbytes/blob/main/bitsandbytes/optim/optimizer.py"
_HELD_ON_DEVICE = "paged-adamw: its moments are counted on the device, where they live until memory runs short"

OPTIMIZERS: Final = {
    "adamw": OptimizerLedger(
        ("moment_1", "moment_2"), "PyTorch 2.13, torch/optim/adam.py", f"{_OPTIM}.AdamW.html", foreach=1, loop=2,
        bound=1, counts_on_device=True,
    ),
    "sgd": OptimizerLedger((), "PyTorch 2.13, torch/optim/sgd.py", f"{_OPTIM}.SGD.html"),
    "momentum": OptimizerLedger(("momentum",), "PyTorch 2.13, torch/optim/sgd.py", f"{_OPTIM}.SGD.html"),
    "adafactor": OptimizerLedger(
        ("moment_2",), "PyTorch 2.13, torch/optim/_adafactor.py", f"{_OPTIM}.Adafactor.html", factored=True, foreach=1, loop=1,
        bound=1,
    ),
    "lion": OptimizerLedger(("momentum",), "Lion, arXiv 2302.06675, program 1", "https://arxiv.org/abs/2302.06675", foreach=1, loop=1),
    "muon": OptimizerLedger(
        ("momentum",), "PyTorch 2.13, torch/optim/_muon.py", f"{_OPTIM}.Muon.html", vectors_adamw=True
    ),
    "adamw-8bit": OptimizerLedger(
        ("moment_1", "moment_2"), "bitsandbytes, Adam8bit (blocks of 256)", _BNB, block=256, smallest=4096
    ),
    "adamw-4bit": OptimizerLedger(
        ("moment_1", "moment_2"), "torchao 0.12, torchao/optim/subclass_4bit.py (blocks of 128)",
        "https://github.com/pytorch/ao/blob/v0.12.0/torchao/optim/subclass_4bit.py", block=128, smallest=4096, bits=4, table=64, small=0,
    ),
    "paged-adamw": OptimizerLedger(
        ("moment_1", "moment_2"), "bitsandbytes, PagedAdamW (fp32 moments)", _BNB, moment=4, note=_HELD_ON_DEVICE
    ),
}  # fmt: skip
