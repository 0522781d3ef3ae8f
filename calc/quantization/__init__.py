"""How a checkpoint says that it stores its weights: `quantization_config` in all its forms, and the tensors that follow from it."""
