"""Faults and attacks: failing calls, damaged files, hostile input."""
