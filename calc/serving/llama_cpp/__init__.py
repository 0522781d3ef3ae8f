"""llama.cpp: its compute buffer, which layers it puts where, and its cache of cells."""

from calc.serving.llama_cpp.buffers import buffers
from calc.serving.llama_cpp.capacity import llama_cpp
from calc.serving.llama_cpp.placement import host_counts, host_weights, place

__all__ = ["buffers", "host_counts", "host_weights", "llama_cpp", "place"]
