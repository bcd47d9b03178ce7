"""Names of the policies, for the command line and the server.

This module imports no policy: policies need numpy, and the command line must start fast.
"""

from __future__ import annotations

POLICY_NAMES = (
    "adaptive",
    "eamc",
    "learned",
    "lfu",
    "lru",
    "arc",
    "eamc-v1",
    "fmoe",
    "lrfu",
    "markov",
    "promoe",
    "s3-fifo",
    "sieve",
)
DEFAULT_POLICY = "learned"
