"""Cache policies: pure objects that see routing events and name victims.

A policy does no I/O, knows no torch and has no clock, so that the runtime and the simulator run the
same objects. Experts are *cells*: layer · E + expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from moeinf.offload.policy.lru import Lru


class Policy(Protocol):
    """Decides who leaves when a slot is needed."""

    def used(self, cells: Iterable[int]) -> None:
        """One layer has routed to `cells`, in this order."""
        ...

    def admitted(self, cell: int) -> None:
        """`cell` now has a slot."""
        ...

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The admitted cell to evict among those that `evictable` allows; None if there is none.

        The policy forgets the cell's residency: the caller evicts it.
        """
        ...


POLICIES: dict[str, Callable[[], Policy]] = {"lru": Lru}
DEFAULT_POLICY = "lru"

__all__ = ["DEFAULT_POLICY", "POLICIES", "Lru", "Policy"]
