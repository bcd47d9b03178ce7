"""Policies of the literature, one file each; docs/league.md compares them."""
