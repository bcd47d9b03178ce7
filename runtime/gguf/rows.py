"""Restore the order of rows that llama.cpp changed for its kernels."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint


def unpaired(heads: int) -> Callable[[Tensor], Tensor]:
    """Return a function that reorders the rows of `heads` heads: [0, d/2, 1, …] -> [0, 1, …].

    llama.cpp rotates neighbours in models of its llama kind, so it stores row i beside row i + d/2.
    """

    def restore(rows: Tensor) -> Tensor:
        if len(rows) % (2 * heads):
            raise BadCheckpoint(f"{len(rows)} rows of Q or K are not {heads} heads of pairs")
        pairs = rows.view(heads, -1, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)

    return restore
