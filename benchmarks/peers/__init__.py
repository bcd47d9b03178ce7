"""Other programs that answer with the same models, one file each; table.py lists them.

A file here runs in the peer's own Python, as a worker (benchmarks/worker.py). It imports the peer
and not moeinf. base.py is their common interface.
"""
