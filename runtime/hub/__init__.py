"""Find and fetch models: short names, the Hugging Face hub and its cache, downloads."""
