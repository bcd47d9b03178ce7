"""Files that are read, replaced and kept safely."""
