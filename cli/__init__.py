"""The command line: parses, asks the runtime, prints, and turns errors into words."""
