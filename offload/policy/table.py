"""List the cache policies by name.

`belady` is not in the table: it needs the future, so only the simulator has it.
"""

from __future__ import annotations

from collections.abc import Callable

from moeinf.offload.policy.adaptive import Adaptive
from moeinf.offload.policy.base import Policy, Setup
from moeinf.offload.policy.eamc import EamcPolicy
from moeinf.offload.policy.learned import Learned
from moeinf.offload.policy.lfu import Lfu
from moeinf.offload.policy.literature.arc import Arc
from moeinf.offload.policy.literature.eamc_v1 import EamcV1
from moeinf.offload.policy.literature.fmoe import Fmoe
from moeinf.offload.policy.literature.lrfu import Lrfu
from moeinf.offload.policy.literature.markov import Markov
from moeinf.offload.policy.literature.promoe import ProMoe
from moeinf.offload.policy.literature.s3_fifo import S3Fifo
from moeinf.offload.policy.literature.sieve import Sieve
from moeinf.offload.policy.lru import Lru

POLICIES: dict[str, Callable[[Setup], Policy]] = {
    "adaptive": Adaptive,
    "eamc": EamcPolicy,
    "learned": Learned,
    "lfu": Lfu,
    "lru": Lru,
    # of the literature, for comparison:
    "arc": Arc,
    "eamc-v1": EamcV1,
    "fmoe": Fmoe,
    "lrfu": Lrfu,
    "markov": Markov,
    "promoe": ProMoe,
    "s3-fifo": S3Fifo,
    "sieve": Sieve,
}
USE_PAST = frozenset({"adaptive", "eamc", "eamc-v1", "learned"})  # these read the EAMC
PREFETCH = USE_PAST | {"fmoe", "markov", "promoe"}
USE_HINTS = frozenset({"adaptive", "learned", "promoe"})
