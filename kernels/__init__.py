"""Triton kernels, one operation a file; each has a plain PyTorch `reference()` beside it.

copy      out = x                              launch    what the launchers share
matmul    out = a · b in bf16, fp16, fp8, int8
"""
