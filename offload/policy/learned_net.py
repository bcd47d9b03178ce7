"""The network of the policy `learned`, written by scripts/train_eviction.py."""

# fmt: off
NET: dict[str, list[float]] = {
    "mean": [0.0] * 18,
    "scale": [0.0] * 18,
    "hidden": [0.0] * 288,
    "hidden_bias": [0.0] * 16,
    "output": [0.0] * 80,
    "output_bias": [0.0] * 5,
}
