"""DeepSpeed's ZeRO engine around a transformers model: its settings by their JSON names, its buffers and live parameters."""
