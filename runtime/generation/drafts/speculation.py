"""Decode several tokens of a request in a pass: draft them, compute them, take the right ones.

    history … b a        draft c d e       rows a c d e: one pass, each row as if it came alone
    logits of a  ──▶ c   right
    logits of c  ──▶ d   right
    logits of d  ──▶ f   another token: it is taken, e is dropped; the state keeps a c d

Each token is chosen from its own logits by the request's sampler, in order. So the answer is the
same with and without drafts, and so is the state. Rejected rows are not history for the policy and
the EAMC.

A draft is what followed the last tokens earlier in the text (lookup.py), else what a smaller model
continues with (model_drafts.py), where the engine has one.

A grammar, whose masks come from another process, decodes without drafts. So does a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moeinf.offload.store.compute import MOST_ROWS
from moeinf.offload.store.expert_store import Stopped
from moeinf.offload.store.transfer import ExpertReadError
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.drafts.draft_gate import DraftGate
from moeinf.runtime.generation.drafts.lookup import Lookup
from moeinf.runtime.generation.drafts.model_drafts import ModelDrafts
from moeinf.runtime.generation.in_flight import Running

Take = Callable[[Running, NDArray[np.float32]], None]


class Speculation:
    """The drafts of one engine's requests."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.gate = engine, DraftGate()
        draft = engine.draft
        self._model = None if draft is None else ModelDrafts(draft, self.gate)

    def step(self, one: Running, take: Take) -> bool:
        """Decode tokens with a draft if that is worth it; False: it is not, and nothing is done.

        take: chooses a token from logits [vocab] for the request. Raises what a pass and `take`
        raise. After Stopped the next round ends the request. An expert that cannot be read may be
        that of a wrong draft, so the caller decodes without one.
        """
        start = time.perf_counter()
        draft, drafting = self._draft(one)
        one.decode_seconds += time.perf_counter() - start
        if not draft:
            return False
        engine, answer, before = self._engine, one.answer, one.decode_seconds
        kept = 0

        def accept(logits: Tensor) -> int:
            nonlocal kept
            for row, wanted in zip(logits.numpy(), [*draft, None], strict=True):
                take(one, row)
                kept += 1
                if answer.done or answer.tokens[-1] != wanted or one.request.stopped():
                    break
            return kept

        waited, start = engine.store.stats.stall_seconds, time.perf_counter()
        try:
            with engine.stoppable(one.request.stopped):
                engine.check(one.place.state, [answer.tokens[-1], *draft], accept)
        except Stopped:
            return True
        except ExpertReadError:
            return False
        spent, taking = time.perf_counter() - start, one.decode_seconds - before
        one.decode_seconds = before + spent  # `take` has counted its own time
        waited = engine.store.stats.stall_seconds - waited
        self.gate.checked(one.drafts, len(draft), kept, spent - taking, waited, drafting)
        return True

    def _draft(self, one: Running) -> tuple[list[int], float]:
        """Return tokens that are worth a place in the next pass, and the seconds they took."""
        if one.constraint is not None or not self._engine.info.drafts:
            return [], 0.0
        if one.lookup is None:
            one.lookup = Lookup(self._engine.info.context)
        one.lookup.follow(one.answer.history)
        state = one.place.state
        rows = min(MOST_ROWS, one.answer.left, state.capacity - state.length)
        if (most := one.request.limits.drafts) is not None:
            rows = min(rows, 1 + most)
        if one.lookup.matched:
            chances = one.lookup.acceptance.chances(one.lookup.matched, rows - 1)
            if found := one.lookup.draft(self.gate.worth(one.drafts, chances)):
                return found, 0.0
        return ([], 0.0) if self._model is None else self._model.draft(one, rows)
