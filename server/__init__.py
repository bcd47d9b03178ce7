"""Serve HTTP: parse requests and send answers. The layer is that of the command line."""
