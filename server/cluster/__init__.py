"""Serve one address from replicas in a Ray cluster. Imported only where one is asked for."""
