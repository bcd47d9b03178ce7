"""Record what a model routes, and keep the EAMC on disk."""
