"""Load prompts to trace: named data sets of the hub, the demo's held-out items, local files."""
