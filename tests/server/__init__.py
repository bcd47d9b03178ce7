"""Test the HTTP server as its clients see it."""
