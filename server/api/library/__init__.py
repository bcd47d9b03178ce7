"""Serve what changes, checks or plans the models on this machine."""
