"""Triton kernels, one operation a file; each has a plain PyTorch `reference()` next to it.

copy, triad    bandwidth: out = x, out = a + scale·b
matmul    out = a · b in bf16, fp16, fp8, int8
flash_attention, flash_attention_backward    softmax(q·kᵀ)·v: causal, grouped heads, sliding window
standard_attention    the same with all scores in memory
paged_decode    one query a sequence over a cache in blocks: grouped heads, latents
cross_entropy    the loss, and its gradient where the logits were
softmax, rms_norm, layer_norm, swiglu, rope    both ways
quantize_int8, quantize_nf4    and back: absmax by row; blocks of 64, their absmaxes quantised too
int8_matmul, int4_matmul    16-bit activations by quantised weights
adamw    one step, in place
launch, attention_tiles    what launchers, and the kernels of attention, share; compiled.csv: what may be tuned over

Results are tested in Triton's interpreter and every kernel compiles for GPUs (`make check-kernels`); how fast they are there
has not been run.
"""
