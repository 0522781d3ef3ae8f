"""What fits, what it costs, what to change, and checkpoints on disk."""
