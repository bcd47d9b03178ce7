"""Model families in pure torch; `families` has their table, `base` their interface.

This file imports nothing: every module below imports it first, so imports here would make a ring.
"""
