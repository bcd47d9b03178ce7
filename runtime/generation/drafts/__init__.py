"""Drafted tokens, which one pass checks: where they come from, and when they are worth it."""
