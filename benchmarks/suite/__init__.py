"""One command over all scenarios and all programs: python -m benchmarks.

scenarios.py  the scenarios               row.py     one program in one scenario
models.py     the files, and their size   report.py  JSON, Markdown and pictures
command.py    options, order, resuming
"""
