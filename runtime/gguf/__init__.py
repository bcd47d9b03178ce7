"""Read GGUF files, the format of llama.cpp, as checkpoints."""
