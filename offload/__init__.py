"""The expert cache: residency, fetching and eviction. It is independent of model families."""
