"""Run many requests: benchmarks, evaluation, traces, data sets."""
