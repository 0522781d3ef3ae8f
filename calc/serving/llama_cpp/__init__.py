"""llama.cpp: its compute buffer, what it leaves in host memory, and its cache of cells."""

from calc.serving.llama_cpp.buffers import buffers
from calc.serving.llama_cpp.capacity import llama_cpp

__all__ = ["buffers", "llama_cpp"]
