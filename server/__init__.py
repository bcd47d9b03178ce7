"""The HTTP face stands on this floor, beside the command line: parse, answer, know no model."""
