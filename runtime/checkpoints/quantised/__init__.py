"""Read the quantised formats of published weights."""
