"""Serve one address from replicas in a Ray cluster. Imported only for `serve --cluster`."""
