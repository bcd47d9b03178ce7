"""What policies are called, for faces that offer them.

Does not know policies: those need numpy, and a command line must be there at once.
"""

from __future__ import annotations

POLICY_NAMES = ("adaptive", "eamc", "lfu", "lru")
DEFAULT_POLICY = "adaptive"
