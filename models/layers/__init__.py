"""The parts that families are made of: attention, feed-forward, norms, rope, routing."""
