"""Replay recorded routing against a policy under a model of time."""
