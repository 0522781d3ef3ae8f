"""Schemes: the tensors that a format keeps for one linear layer, with the bits of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from calc.units import ceil_div

BF16_COMPUTE = ("bf16", "fp16")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a quantised layer: `bits` for each cell of `rows` output features by `columns` input features (0: all of them).

    `flat`: a cell is so many elements of the weight in a row, whatever its shape (bitsandbytes).
    """

    name: str
    bits: int
    rows: int = 1
    columns: int = 1
    flat: int = 0

    def cells(self, output: int, inputs: int) -> int:
        """Cells of a layer of (output, inputs)."""
        if self.flat:
            return ceil_div(output * inputs, self.flat)
        rows = ceil_div(output, self.rows) if self.rows > 0 else 1
        return rows * (ceil_div(inputs, self.columns) if self.columns > 0 else 1)

    def latex(self, output: str, inputs: str) -> str:
        """The cells as a formula of the two sides' formulas; "" for one."""
        if self.flat:
            return rf"\lceil \frac{{{output} \cdot {inputs}}}{{{self.flat}}} \rceil"
        sides = [_side(output, self.rows), _side(inputs, self.columns)]
        return r" \cdot ".join(filter(None, sides))


def _side(side: str, size: int) -> str:
    if size <= 1:
        return side if size == 1 else ""
    return rf"\lceil \frac{{{side}}}{{{size}}} \rceil"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a format stores one linear layer. `tensors` begin with the values; `compute` is the number format of its matmuls, in
    order of preference; `label` names it to a reader."""

    label: str
    tensors: tuple[Tensor, ...]
    compute: tuple[str, ...]
    source: str
    url: str = ""
    assumes: tuple[str, ...] = ()
    value_bits: int = 0  # of one value, where a cell of the first tensor holds several

    @property
    def bits(self) -> int:
        """Bits of one value, scales left out."""
        return self.value_bits or self.tensors[0].bits

    def with_tensors(self, *more: Tensor) -> Scheme:
        return replace(self, tensors=(*self.tensors, *more))


def values(bits: int) -> Tensor:
    return Tensor("", bits)


_PLAIN = ("PyTorch number formats", "https://docs.pytorch.org/docs/stable/tensor_attributes.html")
BF16 = Scheme("bf16", (values(16),), BF16_COMPUTE, *_PLAIN)
FP16 = Scheme("fp16", (values(16),), ("fp16",), *_PLAIN)
FP32 = Scheme("fp32", (values(32),), ("fp32",), *_PLAIN)


def group(size: int) -> int:
    """The columns of a group: -1 or 0 is one group for all input features."""
    return size if size > 0 else 0


_GPTQ = ("GPTQ, arXiv 2210.17323; tensors as GPTQModel packs them", "https://arxiv.org/abs/2210.17323")
_AWQ = ("AWQ, arXiv 2306.00978; tensors as AutoAWQ packs them", "https://arxiv.org/abs/2306.00978")
_LLM_INT8 = ("LLM.int8(), arXiv 2208.07339: one fp32 scale for each row", "https://arxiv.org/abs/2208.07339")
_QLORA = ("QLoRA, arXiv 2305.14314, section 3", "https://arxiv.org/abs/2305.14314")
_DEEPSEEK = (
    "DeepSeek-V3, arXiv 2412.19437, section 3.3: one fp32 scale for each block of the weight",
    "https://arxiv.org/abs/2412.19437",
)
_MX = (
    "OCP Microscaling Formats 1.0: an 8-bit scale for each 32",
    "https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf",
)
_NVFP4 = (
    "NVIDIA, Introducing NVFP4: an fp8 scale for each 16, and an fp32 scale a tensor",
    "https://developer.nvidia.com/blog/introducing-nvfp4-for-efficient-and-accurate-low-precision-inference/",
)
_MLX = (
    "MLX, mlx.core.quantize: a scale and a bias for each group",
    "https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html",
)


def gptq(bits: int, size: int, *, index: bool = True, zeros: bool = True, biases: bool = False) -> Scheme:
    """GPTQ: packed values, a packed zero and a 16-bit scale for each group and output, and the group of each input. `biases`:
    every layer has one, of zeros where the model has none, as AutoGPTQ wrote them before 0.7."""
    tensors = [values(bits), Tensor("scales", 16, 1, group(size))]
    tensors += [Tensor("zeros", bits, 1, group(size))] if zeros else []
    tensors += [Tensor("group_index", 32, 0, 1)] if index else []
    tensors += [Tensor("bias", 16, 1, 0)] if biases else []
    return Scheme(f"gptq-int{bits}", tuple(tensors), BF16_COMPUTE, *_GPTQ)


def awq(bits: int, size: int, *, zeros: bool = True) -> Scheme:
    """AWQ: packed values, and for each group and output a packed zero and a 16-bit scale."""
    scales = (Tensor("scales", 16, 1, group(size)), *((Tensor("zeros", bits, 1, group(size)),) if zeros else ()))
    return Scheme(f"awq-int{bits}", (values(bits), *scales), BF16_COMPUTE, *_AWQ)


def llm_int8() -> Scheme:
    """bitsandbytes' 8 bits: a row's scale in fp32."""
    return Scheme("int8", (values(8), Tensor("scales", 32, 1, 0)), ("int8",), *_LLM_INT8)


def bnb4(kind: str, *, double: bool) -> Scheme:
    """bitsandbytes' 4 bits: blocks of 64 values, whose scales are fp32, or 8 bits in blocks of 256 with double quantisation."""
    nested = (Tensor("scales", 8, flat=64), Tensor("nested_scales", 32, flat=64 * 256))
    scales = nested if double else (Tensor("scales", 32, flat=64),)
    return Scheme(kind, (values(4), *scales), BF16_COMPUTE, *_QLORA)


def bnb4_tables(*, double: bool) -> tuple[Tensor, ...]:
    """What a saved 4-bit layer also holds: the 16 values of its format, and the 256 of its scales'."""
    return (Tensor("table", 16 * 32, 0, 0), *((Tensor("nested_table", 256 * 32, 0, 0),) if double else ()))


def fp8(rows: int, columns: int, *, scale_bits: int = 32, static: bool = False, weight_only: bool = False) -> Scheme:
    """8-bit floats with one scale for each `rows` x `columns` (0: all); `static`: the input has a stored scale as well."""
    scales = [Tensor("scales", scale_bits, rows, columns)]
    scales += [Tensor("input_scale", scale_bits, 0, 0)] if static else []
    shape = "a block" if rows > 1 else "a row" if rows else "a tensor"
    source = (
        _DEEPSEEK
        if rows > 1
        else (f"FP8 formats, arXiv 2209.05433, with one scale {shape}", "https://arxiv.org/abs/2209.05433")
    )
    return Scheme("fp8", (values(8), *scales), BF16_COMPUTE if weight_only else ("fp8",), *source)


def mx(bits: int, *, kind: str = "fp", compute: tuple[str, ...] = BF16_COMPUTE) -> Scheme:
    """Microscaling: an 8-bit exponent for each 32."""
    return Scheme(f"mx{kind}{bits}", (values(bits), Tensor("scales", 8, 1, 32)), compute, *_MX)


def nvfp4(*, inputs: bool = True, size: int = 16) -> Scheme:
    """NVFP4: an fp8 scale for each 16 and an fp32 scale for the tensor; `inputs`: activations are fp4 as well, with a scale."""
    tensors = [values(4), Tensor("scales", 8, 1, size), Tensor("tensor_scale", 32, 0, 0)]
    tensors += [Tensor("input_scale", 32, 0, 0)] if inputs else []
    return Scheme("nvfp4", tuple(tensors), ("fp4",) if inputs else BF16_COMPUTE, *_NVFP4)


def mlx(bits: int, size: int, mode: str) -> Scheme:
    """MLX: a 16-bit scale and a 16-bit bias for each group ("affine"), or a microscaling format's 8-bit scale."""
    size = group(size)
    pair = (Tensor("scales", 16, 1, size), Tensor("biases", 16, 1, size))
    return Scheme(
        f"mlx-int{bits}" if mode == "affine" else mode,
        (values(bits), *(pair if mode == "affine" else (Tensor("scales", 8, 1, size),))),
        BF16_COMPUTE,
        *_MLX,
    )


def integers(
    bits: int, rows: int, columns: int, *, scale_bits: int = 16, zero_bits: int = 0, dynamic: bool = False
) -> Scheme:
    """Whole numbers of so many bits with a scale for each `rows` x `columns`, and a zero of `zero_bits` where it is above 0."""
    tensors = [values(bits), Tensor("scales", scale_bits, rows, columns)]
    tensors += [Tensor("zeros", zero_bits, rows, columns)] if zero_bits else []
    compute = ("int8",) if dynamic and bits == 8 else BF16_COMPUTE
    return Scheme(
        f"int{bits}",
        tuple(tensors),
        compute,
        "compressed-tensors: packed whole numbers with their scales",
        "https://github.com/vllm-project/compressed-tensors",
    )
