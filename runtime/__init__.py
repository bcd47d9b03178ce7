"""Compose models and offload into an engine. Only this layer imports both."""
