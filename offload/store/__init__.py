"""The expert cache in host memory: slots, transfers, prefetch and arithmetic."""
