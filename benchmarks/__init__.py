"""The race: real shapes with random weights, moeinf against other programs, in alternation.

Not part of the wheel. `python -m benchmarks --help` in a clone;
docs/performance.md has what came out.
"""
