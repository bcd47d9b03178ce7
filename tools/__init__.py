"""Tools for people who change moeinf: `python -m tools VERB`."""
