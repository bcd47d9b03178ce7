"""Make a model from a checkpoint: its formats, shards and manifest."""
