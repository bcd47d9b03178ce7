"""KV of ended requests, kept in RAM and on disk, and found by the longest common prefix."""
