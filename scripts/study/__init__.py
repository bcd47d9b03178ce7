"""Compute the tables and pictures of docs/study.md from recorded requests of real models."""
