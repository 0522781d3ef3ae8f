"""The programs of Megatron-LM with Transformer Engine (fused) and of arXiv 2205.05198 (paper)."""
