"""llama.cpp: its compute buffer, which layers it puts where, and its cache of cells."""

from calc.serving.llama_cpp.buffers import buffers
from calc.serving.llama_cpp.capacity import llama_cpp
from calc.serving.llama_cpp.host_memory import HostMemory, host_memory
from calc.serving.llama_cpp.placement import place

__all__ = ["HostMemory", "buffers", "host_memory", "llama_cpp", "place"]
