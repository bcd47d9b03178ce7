"""Cache policies by name. base.py says what a policy is.

Does not know who runs them. `belady` needs the future, so it is the simulator's alone.
"""

from __future__ import annotations

from collections.abc import Callable

from moeinf.offload.policy.adaptive import Adaptive
from moeinf.offload.policy.base import Passive, Policy, Setup, Wish
from moeinf.offload.policy.eamc import EamcPolicy
from moeinf.offload.policy.lfu import Lfu
from moeinf.offload.policy.lru import Lru

POLICIES: dict[str, Callable[[Setup], Policy]] = {
    "adaptive": Adaptive,
    "eamc": EamcPolicy,
    "lfu": Lfu,
    "lru": Lru,
}
USE_PAST = frozenset({"adaptive", "eamc"})  # these read the EAMC, and may wish
USE_HINTS = frozenset({"adaptive"})

__all__ = [
    "POLICIES", "USE_HINTS", "USE_PAST", "Lru", "Passive", "Policy", "Setup", "Wish",
]  # fmt: skip
