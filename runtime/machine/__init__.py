"""Facts of this machine: memory, GPU, drive and bus, and what was measured of them."""
