"""The model that drafts for an engine: weights, experts and memory of its own, in the same process.

Its rows need not be exact: the engine's own model checks every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from moeinf.models.layers.kv_cache import KvCache
from moeinf.offload.store.compute import MOST_ROWS
from moeinf.offload.store.expert_store import ExpertStore
from moeinf.runtime.config import PREFILL_CHUNK
from moeinf.runtime.engine.loader import LoadedModel, check_small_files
from moeinf.runtime.engine.opening import Plan, load_weights, open_tiers, warm_up
from moeinf.runtime.library.draft_model import token_bytes
from moeinf.runtime.placement.draft_plan import draft_config


class DraftEngine:
    """A loaded draft model with the state of one text. Not thread-safe: the engine's thread."""

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
        self.cost, self._torch_threads = cost, torch_threads
        state = weights.model.new_state(context)
        assert isinstance(state, KvCache)
        self.state = state

    def close(self) -> None:
        """Release the memory of the state."""
        del self.state

    def extend(self, ids: Sequence[int], stopped: Callable[[], bool]) -> tuple[int, float]:
        """Append ids to the state; return the most probable next token and its probability.

        Raises what a pass raises, and Stopped once `stopped` returns True. The state then holds
        whole chunks.
        """
        wanted = 1 if len(ids) <= MOST_ROWS else self._torch_threads
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)
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
        return _best(logits[0, : self._vocab])


def _best(logits: Tensor) -> tuple[int, float]:
    most, token = logits.max(0)
    return int(token), float((most - logits.logsumexp(0)).exp())


def open_draft(plan: Plan, vocab: int, opened: ExitStack) -> DraftEngine | None:
    """Load the draft model of a plan; None without one. Raises DamagedModel.

    vocab: the tokens of the engine's own model.
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
    vocab = min(vocab, weights.model.vocab_size)
    cost = token_bytes(manifest) / token_bytes(plan.manifest)
    engine = DraftEngine(weights, tiers.store, placement.context, vocab, cost, placement.threads)
    opened.callback(engine.close)
    return engine
