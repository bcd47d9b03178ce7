"""Faults and attacks: what breaks, what is torn, what is sent by strangers."""
