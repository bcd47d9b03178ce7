"""Anthropic's Messages API: its requests, its content blocks and its events."""
