"""What links are usual around a GPU: the size of its NVLink domain, and its network adapter in the vendor's own systems."""

from __future__ import annotations

from typing import Final

from calc.hardware import Gpu

_NVL72: Final = ("gb200", "gb300")

# GB/s one way of one GPU's network adapter in the vendor's own systems
_NICS: Final = (
    ("gb300", 100.0, "ConnectX-8, 800 Gb/s a GPU (NVIDIA DGX GB300 data sheet)"),
    ("b300", 100.0, "ConnectX-8, 800 Gb/s a GPU (NVIDIA DGX B300 data sheet)"),
    ("gb200", 50.0, "ConnectX-7, 400 Gb/s a GPU (NVIDIA DGX GB200 data sheet)"),
    ("b200", 50.0, "ConnectX-7, 400 Gb/s a GPU (NVIDIA DGX B200 data sheet)"),
    ("gh200", 50.0, "ConnectX-7, 400 Gb/s a GPU (NVIDIA GH200 data sheet)"),
    ("h200", 50.0, "ConnectX-7, 400 Gb/s a GPU (NVIDIA DGX H200 data sheet)"),
    ("h100", 50.0, "ConnectX-7, 400 Gb/s a GPU (NVIDIA DGX H100 data sheet)"),
    ("a100", 25.0, "ConnectX-6, 200 Gb/s a GPU (NVIDIA DGX A100 data sheet)"),
    ("mi300x", 50.0, "400 Gb/s a GPU (AMD Instinct MI300X platform reference)"),
    ("mi325x", 50.0, "400 Gb/s a GPU (AMD Instinct MI325X platform reference)"),
)
_OTHER_NIC: Final = (12.5, "assumed: 100 Gb/s a GPU")


def usual_links(gpu: Gpu) -> tuple[int, float, str]:
    """The GPUs of a node or NVLink domain around that GPU, GB/s one way of its network adapter, and whose figure that is."""
    rate, source = next(((rate, source) for name, rate, source in _NICS if gpu.name.startswith(name)), _OTHER_NIC)
    return 72 if gpu.name.startswith(_NVL72) else 8, rate, source
