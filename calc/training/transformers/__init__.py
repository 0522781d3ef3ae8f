"""The program of transformers (hf, liger), with peft's adapters and TRL's objectives."""
