"""Dense layers on the CPU and on the GPU."""
