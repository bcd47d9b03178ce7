"""Race moeinf against other programs, in alternation, on real shapes with random weights.

This package is not part of the wheel. `python -m benchmarks --help` works in a clone;
docs/performance.md and docs/performance/ have the results.
"""
