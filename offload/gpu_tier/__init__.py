"""The expert cache in GPU memory, above the one in host memory."""
