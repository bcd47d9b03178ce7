"""Hold one request on its way through a scheduler: prepared, then in its own place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moeinf.models.base import State
from moeinf.models.layers.kv_cache import KvCache
from moeinf.offload.routing.trace import RequestEam
from moeinf.offload.store.transfer import ExpertReadError
from moeinf.runtime.config import PREFILL_CHUNK
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.pipeline.links import StageFailed
from moeinf.runtime.engine.request_tracing import RequestTracing
from moeinf.runtime.generation.answer import Answer
from moeinf.runtime.generation.drafts.draft_gate import DraftStats
from moeinf.runtime.generation.drafts.lookup import Lookup
from moeinf.runtime.generation.events import Ended, Request, TokenInfo
from moeinf.runtime.prefix.cache import PrefixCache
from moeinf.runtime.sampling.grammar import Constraint

READ_FAILED = ExpertReadError, StageFailed  # a pass that only one of its requests may need


@dataclass(eq=False)
class Place:
    """Room for one request.

    reusable: the first tokens of the state, which another request may reuse.
    """

    state: State
    reusable: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Prepared:
    """A request whose prompt is made. It has no place while its grammar is compiled."""

    request: Request
    prompt: list[int]
    constraint: Constraint | None

    def ready(self, seconds: float) -> bool:
        """Wait for the grammar, `seconds` at most. Raises BadFormat."""
        return self.constraint is None or self.constraint.ready(seconds)

    def close(self) -> None:
        """Release the grammar."""
        if self.constraint is not None:
            self.constraint.close()


@dataclass(eq=False)
class Running:
    """A request that has a place."""

    request: Request
    place: Place
    answer: Answer
    constraint: Constraint | None
    prompt_tokens: int  # of the decoder
    cached_tokens: int
    number: int  # with the engine
    encoded: bool = False  # the encoder has read the source
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0  # of passes and of choosing
    logits: NDArray[np.float32] | None = None  # of the last pass, before a token is chosen
    states: NDArray[np.float64] | None = None  # [D], the sum over the prompt; of embeddings only
    lookup: Lookup | None = None  # from the first pass on that may check a draft
    drafts: DraftStats = field(default_factory=DraftStats)

    @property
    def prefilled(self) -> bool:
        """True once the whole prompt is in the state."""
        return self.place.state.length >= self.prompt_tokens and (
            self.encoded or not self.request.source
        )

    def read(self, seconds: float, tracing: RequestTracing) -> None:
        """Count the time of a window of the prompt; report its routing if the request wants it."""
        self.prefill_seconds += seconds
        if self.request.routed is not None:
            with suppress(Exception):  # an answer matters more than its record
                self.request.routed(tracing.so_far(self.number), False)

    def left(self, eam: RequestEam | None) -> None:
        """Report the routing of the whole request if it wants it."""
        if self.request.routed is not None:
            self.request.routed(eam, True)

    def keep(self, prefixes: PrefixCache) -> None:
        """Keep the KV of the text; report what is held of its prompt if the request wants it."""
        state = self.place.state
        if not self.request.kept or self.request.embed or not isinstance(state, KvCache):
            return
        prefixes.keep(state, self.place.reusable)
        if self.request.stored is not None:
            prompt = self.answer.history[: self.prompt_tokens]
            self.request.stored(prefixes.find(prompt), len(prompt))

    def next_tokens(self, count: int) -> list[int]:
        """Return the next tokens of the prompt, `count` at most."""
        at = self.place.state.length
        return self.answer.history[at : min(at + count, self.prompt_tokens)]

    def ended(
        self,
        reason: Literal["stop", "length", "cancelled"],
        load_seconds: float,
        lossy: Mapping[str, float],
    ) -> Ended:
        """Return the last event of the request."""
        return Ended(
            reason,
            prompt_tokens=len(self.request.source) or self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            token_ids=tuple(self.answer.tokens),
            load_seconds=load_seconds,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            request=self.number,
            lossy=lossy,
            counted=self.prefilled,
            drafted=self.drafts.drafted,
            accepted=self.drafts.accepted,
            stop_text=self.answer.stop_text,
        )

    def close(self) -> None:
        """Release the grammar."""
        if self.constraint is not None:
            self.constraint.close()


def shared_tokens(reusable: Sequence[int], prompt: Sequence[int], step: int) -> int:
    """Return the length of the common beginning: less than the prompt, a multiple of step.

    The last token of a prompt is always computed: an answer starts from its logits.
    """
    most = max(0, min(len(reusable), len(prompt) - 1)) // step * step
    for start in range(0, most, PREFILL_CHUNK):
        end = min(start + PREFILL_CHUNK, most)
        if reusable[start:end] != prompt[start:end]:
            same = next(i for i in range(start, end) if reusable[i] != prompt[i])
            return same // step * step
    return most


def reusing(engine: Engine, free: Sequence[Place], prompt: Sequence[int]) -> Place:
    """Return the free place whose state holds as much of the prompt as is known.

    If no place shares a token, it is the one that has been free for longest.
    """
    step, prefixes = engine.info.prefix_grain, engine.prefixes
    known = [shared_tokens(place.reusable, prompt, step) for place in free]
    place = free[known.index(max(known))]
    state = place.state
    state.truncate(max(known))
    if state.length % step:  # some states cannot be cut at every token
        state.truncate(0)
    try:
        if prefixes is not None:
            found = prefixes.find(prompt)
            if found.tokens > state.length:
                assert isinstance(state, KvCache)
                prefixes.restore(state, found)
    finally:  # also of a part that was restored
        place.reusable = list(prompt[: state.length])
    return place


def direction(total: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return total [D] at length 1: a mean has the direction of its sum."""
    return (total / max(float(np.linalg.norm(total)), 1e-12)).astype(np.float32)


def token_info(logits: NDArray[np.float32], token: int, count: int) -> TokenInfo:
    """Return log-probabilities under the logits themselves, before temperature and cut-offs."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    best = np.argsort(-wide, kind="stable")[:count]
    return TokenInfo(token, float(wide[token]), [(int(t), float(wide[t])) for t in best])
