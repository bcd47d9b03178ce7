"""One command over all scenarios and all programs: python -m benchmarks.

scenarios.py  the scenarios               figures.py  the figures of a row
models.py     the files, and their size   goals.py    the goals, and the profile of a missed one
command.py    options, order, resuming    report.py   JSON and Markdown
row.py        one program in one scenario picture.py  the picture
"""
