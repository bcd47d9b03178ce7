"""Decide where a model's parts go, and what speed that allows."""
