"""Hold the loaded engines, and the threads that answer requests with them."""
