"""Tests of the compiled floor."""
