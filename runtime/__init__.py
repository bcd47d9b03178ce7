"""Composes models and offload into an engine that answers. The only floor that knows both."""
