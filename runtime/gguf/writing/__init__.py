"""GGUF files as we write them."""
