"""Routing as data: EAMs, recordings, the EAMC, hints for the next layer."""
