"""The HTTP face, as its clients see it."""
