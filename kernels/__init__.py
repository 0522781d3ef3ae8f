"""Triton kernels, one operation a file; each has a plain PyTorch `reference()` beside it.

copy      out = x                              launch    what the launchers share
triad     out = a + scale·b
matmul    out = a · b in bf16, fp16, fp8, int8
flash_attention, flash_attention_backward    softmax(q·kᵀ)·v, causal, grouped, windowed (attention_tiles: what they share)
standard_attention    the same with all scores in memory
cross_entropy    the loss, and its gradient where the logits were
paged_decode    one query a sequence over a cache in blocks: grouped heads, latents
softmax, rms_norm, layer_norm, swiglu, rope    both ways
quantize_int8, quantize_nf4    and back: absmax by row; blocks of 64, their absmaxes quantised too
int8_matmul, int4_matmul    16-bit activations by quantised weights
adamw    one step, in place
"""
