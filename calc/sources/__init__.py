"""The door to files and the network: where a model's config comes from."""
