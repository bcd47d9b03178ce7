"""Make, check, copy, lock and remove the models on this machine."""
