"""Choose a replica for a request: by its prefix, its experts, and the load. Knows no network."""
