"""Guard every request: check its sender, limit its size, read and write JSON."""
