"""Runs over many requests: benchmarks, evaluation, traces, data sets."""
