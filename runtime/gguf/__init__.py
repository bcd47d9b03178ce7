"""The GGUF format of llama.cpp: its files, architectures and vocabularies."""
