"""Lossy options for an absent expert: leave it out, or compute a copy in fewer bits."""
