"""The expert cache: who is where, what to fetch and what to evict. Knows no family."""
