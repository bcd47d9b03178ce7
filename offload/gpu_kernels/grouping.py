"""Sort (token, expert) pairs into blocks that share an expert, without a wait by the host.

Every step is a torch operation whose shape is known on the host beforehand:

    slots    1  -  0  1  1  -  0  1     by pair; "-" is not on the device
    order    2  6 | 0  3  4  7 | 1  5   sorted, stable: within an expert by pair
    begins   0      2  4         8  8   of blocks of at most 2; 8, the number of pairs: no block
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_NOWHERE = 2**31 - 1  # sorts last


@dataclass(frozen=True)
class Blocks:
    """Blocks of up to `rows` pairs of one expert each."""

    rows: int
    begins: Tensor  # int64 [most]: index in `order` where each begins, or P
    slots: Tensor  # int32 [P], sorted
    order: Tensor  # int64 [P]: pairs by slot

    @property
    def most(self) -> int:
        """The largest possible number of blocks."""
        return len(self.begins)


def blocks_of(slots: Tensor, experts: int, rows: int) -> Blocks:
    """Sort slots, int32 [P], -1 if not resident, into blocks of up to `rows` pairs.

    experts: the largest number of different slots.
    """
    pairs = len(slots)
    most = min(pairs, pairs // rows + experts)  # only the last block of an expert is not full
    kept, order = torch.where(slots < 0, _NOWHERE, slots).sort(stable=True)
    place = torch.arange(pairs, device=slots.device)
    opens = (place - torch.searchsorted(kept, kept)) % rows == 0
    opens &= kept != _NOWHERE
    begins = torch.full((most + 1,), pairs, device=slots.device)
    begins.scatter_(0, torch.where(opens, opens.cumsum(0) - 1, most), place)
    return Blocks(rows, begins[:most], kept, order)
