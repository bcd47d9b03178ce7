"""Cache policies: which expert to evict, which to prefetch. base.py says what a policy is."""
