"""What lies on a device besides activations: tensors, their states, how ranks divide them, and where else they lie."""
