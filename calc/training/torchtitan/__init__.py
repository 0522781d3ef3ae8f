"""torchtitan's program."""
