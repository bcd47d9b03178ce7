"""What guards every request: who may ask, how much may arrive, JSON in and out."""
