"""What a model is: layers described by their parts (mixer, feed-forward, norms), read from a Hugging Face config."""
