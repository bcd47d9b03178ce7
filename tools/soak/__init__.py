"""The soak of the server: `python -m tools soak`."""
