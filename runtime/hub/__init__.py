"""Where models come from: names, the Hugging Face hub and its cache, downloads."""
