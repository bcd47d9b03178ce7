"""Parts of requests: sampling, fields that may be absent or unknown, and bounds."""
