"""Draft for an engine with a smaller model, which has weights, experts and memory of its own.

It is in the same process. Its rows need not be exact: the engine's own model checks every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from moeinf.models.base import Model
from moeinf.models.layers.kv_cache import KvCache
from moeinf.offload.store.compute import MOST_ROWS
from moeinf.offload.store.expert_store import ExpertStore
from moeinf.runtime.config import PREFILL_CHUNK
from moeinf.runtime.engine.loader import LoadedModel, check_small_files
from moeinf.runtime.engine.opening import Plan, load_weights, open_tiers, warm_up
from moeinf.runtime.library.draft_model import token_bytes
from moeinf.runtime.placement.draft_plan import draft_config


class Drafter(Protocol):
    """A model or a layer that continues a text greedily.

    begin: the tokens of a text before those of the state, which are skipped. cost: the bytes of a
    token, in those of the engine's model. usual_chance: of its first token to be right.
    """

    state: KvCache
    begin: int
    cost: float
    usual_chance: float

    @property
    def place(self) -> int:
        """The place in the text of the token that is drafted next."""
        ...

    def text(self, history: Sequence[int]) -> Sequence[int]:
        """Return the last tokens of a text, those that a state is to hold before a draft.

        Empty: it cannot draft now. Tokens may be dropped from the state.
        """
        ...

    def extend(self, ids: Sequence[int], stopped: Callable[[], bool]) -> tuple[int, float]:
        """Append ids to the state; return the most probable next token and its probability.

        Raises what a pass raises, and Stopped once `stopped` returns True. The state then holds
        whole chunks.
        """
        ...


class DraftEngine:
    """A `Drafter`: a loaded model with the state of one text. Not thread-safe."""

    usual_chance = 0.7

    def __init__(
        self,
        weights: LoadedModel,
        store: ExpertStore,
        context: int,
        vocab: int,
        cost: float,
        torch_threads: int,
    ) -> None:
        """Take the parts.

        vocab: the tokens that both models have. cost: the bytes of a token, in those of the
        engine's model. torch_threads: for passes of many rows.
        """
        self._weights, self.store, self._vocab = weights, store, vocab
        self.cost, self._torch_threads, self.begin = cost, torch_threads, 0
        state = weights.model.new_state(context)
        assert isinstance(state, KvCache)
        self.state = state

    def close(self) -> None:
        """Release the memory of the state."""
        del self.state

    @property
    def place(self) -> int:
        """See Drafter."""
        return self.begin + self.state.length

    def text(self, history: Sequence[int]) -> Sequence[int]:
        """See Drafter."""
        return history

    def extend(self, ids: Sequence[int], stopped: Callable[[], bool]) -> tuple[int, float]:
        """See Drafter."""
        set_torch_threads(len(ids), self._torch_threads)
        self.store.stopped = stopped
        try:
            for start in range(0, len(ids), PREFILL_CHUNK):
                batch = [(ids[start : start + PREFILL_CHUNK], self.state)]
                logits = self._weights.model.extend(batch, self.store)
        except BaseException:
            self.store.abandon()
            raise
        finally:
            self.store.stopped = lambda: False
        return most_probable(logits[0, : self._vocab])


def set_torch_threads(rows: int, most: int) -> None:
    """Give torch `most` threads for many rows, and one where the native kernels compute."""
    wanted = 1 if rows <= MOST_ROWS else most
    if torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)


def most_probable(logits: Tensor) -> tuple[int, float]:
    """Return the token of the largest of logits [vocab], and its probability."""
    most, token = logits.max(0)
    return int(token), float((most - logits.logsumexp(0)).exp())


def open_draft(plan: Plan, model: Model, opened: ExitStack) -> DraftEngine | None:
    """Load the draft model of a plan for the engine's model; None without one.

    Raises DamagedModel.
    """
    draft = plan.draft
    if draft is None:
        return None
    manifest, folder, placement = draft
    check_small_files(folder, manifest)
    own = replace(
        plan,
        manifest=manifest,
        folder=folder,
        placement=placement,
        config=draft_config(plan.config, placement.context, placement.threads),
        low=None,
        draft=None,
    )
    tiers = open_tiers(own, opened)
    weights = load_weights(own, tiers, opened)
    warm_up(tiers)
    vocab = min(model.vocab_size, weights.model.vocab_size)
    cost = token_bytes(manifest) / token_bytes(plan.manifest)
    engine = DraftEngine(weights, tiers.store, placement.context, vocab, cost, placement.threads)
    opened.callback(engine.close)
    return engine
