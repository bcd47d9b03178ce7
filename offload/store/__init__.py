"""The expert cache in host memory: slots, transfers, prefetch, computing."""
