"""Tests of the compiled modules."""
