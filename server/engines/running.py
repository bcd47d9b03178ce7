"""A request on its way through an engine's thread: prepared, then in a place of its own.

Does not know threads or queues.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moeinf.models.base import State
from moeinf.runtime.config import PREFILL_CHUNK
from moeinf.runtime.engine.generate import Answer
from moeinf.runtime.sampling.grammar import Constraint
from moeinf.server.engines.jobs import Ended, Job, TokenInfo


@dataclass(eq=False)
class Place:
    """Room for one request. prefilled: the tokens of whole prefill chunks that the state begins
    with."""

    state: State
    prefilled: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Prepared:
    """A request whose prompt is made. Its grammar may still be compiled: then it has no place."""

    job: Job
    prompt: list[int]
    constraint: Constraint | None

    def ready(self, seconds: float) -> bool:
        """Wait for the grammar, `seconds` at most. Raises BadFormat."""
        return self.constraint is None or self.constraint.ready(seconds)

    def close(self) -> None:
        """Give back what the grammar has used."""
        if self.constraint is not None:
            self.constraint.close()


@dataclass(eq=False)
class Running:
    """A request that has a place."""

    job: Job
    place: Place
    answer: Answer
    constraint: Constraint | None
    prompt_tokens: int
    cached_tokens: int
    request: int
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    logits: NDArray[np.float32] | None = None  # of the last pass, not yet chosen from
    states: NDArray[np.float64] | None = None  # [D], the sum over the prompt; of embeddings only

    def ended(self, reason: str, load_seconds: float) -> Ended:
        """Return the last event of the request."""
        return Ended(
            reason,  # type: ignore[arg-type]
            self.prompt_tokens,
            self.cached_tokens,
            len(self.answer.tokens),
            load_seconds,
            self.prefill_seconds,
            self.decode_seconds,
        )

    def close(self) -> None:
        """Give back what the grammar has used."""
        if self.constraint is not None:
            self.constraint.close()


def shared_chunks(prefilled: list[int], prompt: list[int]) -> int:
    """Tokens of the whole chunks with which both begin, less than all of the prompt."""
    most = max(0, min(len(prefilled), len(prompt) - 1)) // PREFILL_CHUNK * PREFILL_CHUNK
    shared = 0
    while shared < most:
        end = shared + PREFILL_CHUNK
        if prefilled[shared:end] != prompt[shared:end]:
            break
        shared = end
    return shared


def direction(total: NDArray[np.float64]) -> NDArray[np.float32]:
    """total [D] at length 1: a mean has the direction of its sum."""
    return (total / max(float(np.linalg.norm(total)), 1e-12)).astype(np.float32)


def token_info(logits: NDArray[np.float32], token: int, count: int) -> TokenInfo:
    """Log-probabilities under the logits themselves, before temperature and cut-offs."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    best = np.argsort(-wide, kind="stable")[:count]
    return TokenInfo(token, float(wide[token]), [(int(t), float(wide[t])) for t in best])
