"""Cache policies: which expert to evict, which to prefetch. base.py defines the interface."""
