"""One model over the memory of several processes: each of them, a stage, has some layers."""
