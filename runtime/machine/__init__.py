"""Facts about this machine: memory, GPU, drive and bus, and measurements of them."""
