"""What every launcher shares: interpreter or GPU, the choice of configurations, and the checks of what it is given.

compiled.csv, written by `make check-kernels`, records what the compiler made of every configuration of every kernel, with no GPU:
registers and spilled bytes a thread, shared memory a block, the tensor cores' instruction and the widest access to memory, by
kernel, case (the edge of its largest block) and target. Tuning tries only what spills at most `SPILL` bytes there and fits the
shared memory of the GPU at hand.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch
import triton
import triton.language as tl
from torch import Tensor


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1 before the first import of triton)."""
    return bool(triton.knobs.runtime.interpret)


INTERPRETED: tl.constexpr = tl.constexpr(is_interpreted())  # the same for kernels, settled when they are compiled
LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))  # exp2 is the GPU's own instruction: exponents go in powers of 2

Blocks = dict[str, int]
# elementwise kernels: small blocks keep a small card's few multiprocessors evenly busy, large ones feed a large card's HBM
ELEMENTWISE = [({"BLOCK": block}, warps, 1) for block, warps in ((512, 4), (1024, 4), (2048, 4), (4096, 8), (8192, 8))]


def configs(choices: Iterable[tuple[Blocks, int, int]], interpreted: Blocks) -> list[Any]:
    """Configurations to tune over, each (block sizes, warps, pipeline stages), or the fixed one of the interpreter.

    A list holds choices for consumer cards and for data-centre cards; `clean` leaves what suits the GPU at hand.
    The interpreter has no clock to tune by; its blocks are small, so that small tests cross their edges.
    """
    if is_interpreted():
        return [triton.Config(interpreted)]
    return [triton.Config(blocks, num_warps=warps, num_stages=stages) for blocks, warps, stages in choices]


TABLE = Path(__file__).with_name("compiled.csv")
SPILL = 128  # bytes a thread: a few values that the loop does not touch
# bytes of shared memory that a block may have: NVIDIA's "Compute Capabilities" table, AMD's CDNA 3 instruction set guide
SHARED = {
    "cuda:80": 163 << 10,
    "cuda:86": 99 << 10,
    "cuda:90": 227 << 10,
    "cuda:100": 227 << 10,
    "hip:gfx942": 64 << 10,
}


class Compiled(NamedTuple):
    """One configuration as compiled: blocks as `BM=64 BN=32`, spilled and wide in bytes, tensor the instruction or `-`."""

    kernel: str
    case: str
    target: str
    blocks: str
    warps: int
    stages: int
    registers: int
    spilled: int
    shared: int
    tensor: str
    wide: int


def table() -> list[Compiled]:
    """All rows of compiled.csv, in its order."""
    kinds = get_type_hints(Compiled).values()
    with TABLE.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.reader(lines))[1:]
    return [Compiled(*(kind(cell) for kind, cell in zip(kinds, row, strict=True))) for row in rows]


def blocks(config: Any) -> str:
    """The blocks of a configuration as the table writes them."""
    return " ".join(f"{name}={value}" for name, value in sorted(config.kwargs.items()))


@cache
def _by_choice(kernel: str, case: str, target: str) -> dict[tuple[str, int, int], Compiled]:
    return {
        (row.blocks, row.warps, row.stages): row
        for row in table()
        if (row.kernel, row.case, row.target) == (kernel, case, target)
    }


def nearest(backend: str, arch: int | str) -> str:
    """The recorded target whose instructions that GPU has: sm_89 and sm_120 multiply as sm_80 does, sm_103 as sm_100."""
    if backend == "hip":
        return "hip:gfx942"
    if 90 <= int(arch) < 100:
        return "cuda:90"
    return "cuda:100" if 100 <= int(arch) < 120 else "cuda:80"


Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Clean:
    """Prunes the choices of a kernel to those that compiled.csv finds clean for `case(arguments)` on the GPU at hand.

    Clean is what spills little, fits the shared memory and has its products on the tensor cores: what asks for more tensor
    memory than sm_100 has compiles to a kernel that does nothing. `useful(arguments)`, blocks among them, drops choices that
    the shape does not fill. A case that is not recorded, and operands so much wider than 16 bits that nothing fits, leave the
    last choice, which needs least shared memory.
    """

    kernel: str
    case: Callable[[Arguments], str]
    useful: Callable[[Arguments], bool] = lambda given: True

    def __call__(self, choices: list[Any], given: Arguments, **others: Any) -> list[Any]:
        if is_interpreted():
            return choices
        given = {**given, **others}
        driver = triton.runtime.driver.active
        target = driver.get_current_target()
        most = driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"]
        made = _by_choice(self.kernel, self.case(given), nearest(target.backend, target.arch))
        wider = max(1, max(x.element_size() for x in given.values() if hasattr(x, "element_size")) // 2)

        def fits(choice: Any) -> bool:
            row = made.get((blocks(choice), choice.num_warps, choice.num_stages))
            return bool(row and row.spilled <= SPILL and row.shared * wider <= most and row.tensor != "-")

        return [choice for choice in choices if fits(choice) and self.useful({**given, **choice.kwargs})] or choices[
            -1:
        ]


def clean(
    kernel: str, case: Callable[[Arguments], str], useful: Callable[[Arguments], bool] = lambda given: True
) -> dict[str, Any]:
    """`prune_configs_by` of a kernel: see `Clean`."""
    return {"early_config_prune": Clean(kernel, case, useful)}


def _warps_for_a_row(choices: list[Any], _arguments: dict[str, Any], BLOCK: int, **_others: Any) -> list[Any]:
    """Those that give a thread 8 to 32 elements of the row (with 64, backward spills), or the nearest one."""
    fitting = [choice for choice in choices if 8 <= BLOCK / (32 * choice.num_warps) <= 32]
    return fitting or [choices[0] if BLOCK < 256 else choices[-1]]


def rowwise() -> Any:
    """Decorator of a kernel that holds BLOCK elements of a row in registers: tunes among how many threads."""
    choices: list[tuple[Blocks, int, int]] = [({}, warps, 1) for warps in (1, 2, 4, 8, 16, 32)]
    return triton.autotune(
        configs=configs(choices, {}), key=["N", "BLOCK"], prune_configs_by={"early_config_prune": _warps_for_a_row}
    )


def largest_row() -> int:
    """Elements of a row that a program holds in registers at most (few in the interpreter, so that small tests pass it)."""
    return 64 if is_interpreted() else 16384


def persistent_programs(x: Tensor, rows: int) -> int:
    """Programs for a kernel whose programs go over many rows each: two for each multiprocessor, and no idle ones."""
    most = 3 if is_interpreted() else 2 * torch.cuda.get_device_properties(x.device).multi_processor_count
    return max(1, min(rows, most))


@triton.jit
def widen(x):  # type: ignore[no-untyped-def]
    """x as `tl.dot` may have it: the interpreter multiplies bf16 by its bits, so there it becomes fp32, exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
def as_fp32(x):  # type: ignore[no-untyped-def]
    """x in fp32, exactly; the interpreter's own widening of bf16 loses subnormals."""
    return widen(x).to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 rounded to the nearest `dtype`, ties to even, as a GPU does; the interpreter's own cast to bf16 truncates."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)  # NaN stays NaN
        y = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(dtype)
    return y


def names(dtypes: Iterable[torch.dtype]) -> str:
    """The dtypes as a message lists them: `bfloat16, float16`."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check(
    name: str,
    x: Tensor,
    *,
    dims: int | None = None,
    shape: tuple[int, ...] | None = None,
    dtypes: tuple[torch.dtype, ...] | None = None,
    like: tuple[str, Tensor] | None = None,
) -> None:
    """ValueError unless x is contiguous and has the dimensions, shape, dtype and device that are asked for.

    `like` names another argument, whose device x must share; without it x must be on a GPU, or on the CPU in the
    interpreter. The message states the rule and what was given.
    """
    if dims is not None and x.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions; its shape is {tuple(x.shape)}")
    if shape is not None and tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}; its shape is {tuple(x.shape)}")
    if dtypes is not None and x.dtype not in dtypes:
        rule = names(dtypes) if len(dtypes) == 1 else f"one of {names(dtypes)}"
        raise ValueError(f"{name} must be {rule}; it is {names([x.dtype])}")
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous; its shape is {tuple(x.shape)}, its strides {tuple(x.stride())}")
    if like is None:
        check_device(name, x)
    elif x.device != like[1].device:
        raise ValueError(f"{name} must be on {like[1].device}, where {like[0]} is; it is on {x.device}")


def check_device(name: str, x: Tensor) -> None:
    """ValueError unless kernels can reach x: on a GPU, or on the CPU in the interpreter."""
    if x.device.type != "cuda" and not is_interpreted():
        raise ValueError(
            f"{name} must be on a GPU; it is on {x.device} (set TRITON_INTERPRET=1 before importing triton to run there)"
        )


def power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and `least`: a block's edge that covers n elements."""
    return max(least, int(triton.next_power_of_2(max(n, 1))))
