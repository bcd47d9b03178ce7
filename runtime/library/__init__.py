"""The models on this machine: their manifests, how they are made, checked, copied and locked."""
