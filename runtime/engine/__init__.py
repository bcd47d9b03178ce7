"""One loaded model that answers requests."""
