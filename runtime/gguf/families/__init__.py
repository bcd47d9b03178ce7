"""Tensors and keys of GGUF files that differ from those of a checkpoint, by family."""
