"""List the cache policies by name.

`belady` is not in the table: it needs the future, so only the simulator has it.
"""

from __future__ import annotations

from collections.abc import Callable

from moeinf.offload.policy.adaptive import Adaptive
from moeinf.offload.policy.base import Policy, Setup
from moeinf.offload.policy.eamc import EamcPolicy
from moeinf.offload.policy.lfu import Lfu
from moeinf.offload.policy.lru import Lru

POLICIES: dict[str, Callable[[Setup], Policy]] = {
    "adaptive": Adaptive,
    "eamc": EamcPolicy,
    "lfu": Lfu,
    "lru": Lru,
}
USE_PAST = frozenset({"adaptive", "eamc"})  # these read the EAMC, and may prefetch
USE_HINTS = frozenset({"adaptive"})
