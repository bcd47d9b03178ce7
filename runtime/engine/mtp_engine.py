"""The layers of multi-token prediction that draft for their own model: models/layers/mtp.py.

They read the hidden states of the model's passes, which are kept for one text. Their experts have a
store of their own, with room for all of them. Rows need not be exact: the model checks every token.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from moeinf.models.base import Model, State
from moeinf.models.families import family_of
from moeinf.models.layers.decoder import Decoder
from moeinf.models.layers.mtp import MtpModules
from moeinf.offload.store.expert_store import ExpertStore
from moeinf.runtime.checkpoints.checkpoint import CONFIG, read_json
from moeinf.runtime.config import PREFILL_CHUNK
from moeinf.runtime.engine.draft_engine import most_probable, set_torch_threads
from moeinf.runtime.engine.loader import DenseWeights
from moeinf.runtime.engine.opening import Plan, open_tiers, warm_up
from moeinf.runtime.library.draft_model import token_bytes
from moeinf.runtime.library.manifest import MTP
from moeinf.runtime.placement.draft_plan import draft_config


class TextStates:
    """The hidden states of the last tokens of one text, before the model's last norm.

    A pass of several texts is one of its first text.
    """

    def __init__(self, capacity: int, width: int, dtype: torch.dtype) -> None:
        """Reserve memory for `capacity` tokens; its pages are touched only as tokens arrive."""
        self.rows = torch.empty(capacity, width, dtype=dtype)  # by place in the text
        self.start = 0  # the first place that is known
        self.version = 0  # counts the texts
        self._tokens: list[int] = []  # from `start` on
        self._of: Callable[[], State | None] = lambda: None

    @property
    def end(self) -> int:
        """The position after the last known one."""
        return self.start + len(self._tokens)

    def follow(self, batch: Sequence[tuple[Sequence[int], State]], x: Tensor) -> None:
        """Keep the states x [T, D] of a pass; see Decoder.watcher."""
        ids, state = batch[0]
        past = state.length
        if self._of() is not state or not self.start <= past <= self.end:
            self._of, self._tokens = weakref.ref(state), []
            self.start, self.version = past, self.version + 1
        self._tokens[past - self.start :] = ids
        self.rows[past : past + len(ids)] = x[: len(ids)]

    def reach(self, text: Sequence[int]) -> bool:
        """Return True if the states of the last tokens are known, those after the last one apart.

        Forgets the states of other tokens than those of the text, and those before them.
        """
        known, there = self._tokens, text[self.start : -1]
        if not there or len(known) < len(there):
            return False
        del known[len(there) :]
        if known != there:
            last = max(at for at, token in enumerate(there) if known[at] != token)
            del known[: last + 1]
            self.start, self.version = self.start + last + 1, self.version + 1
        return bool(known)


class MtpEngine:
    """A `Drafter`: one module, with the state of one text. Not thread-safe."""

    usual_chance = 0.85  # 0.85 to 0.9 in DeepSeek-V3's technical report, section 5.4.3

    def __init__(
        self,
        modules: MtpModules,
        model: Decoder,
        store: ExpertStore,
        states: TextStates,
        cost: float,
        threads: int,
    ) -> None:
        """Take the parts, and watch the model's passes. cost: see DraftEngine."""
        self._modules, self._model, self.store = modules, model, store
        self.cost, self._torch_threads, self.begin = cost, threads, 0
        self._states, self._version = states, 0
        self.state = modules.new_state(len(states.rows))
        self._exact = 0  # the first rows of the state, which read the model's own hidden states
        self._last = torch.empty(0)  # the output of the last row, [1, D]
        model.watcher = states.follow

    def close(self) -> None:
        """Release the memory of the states."""
        self._model.watcher = None
        del self.state, self._states

    @property
    def place(self) -> int:
        """See Drafter."""
        return self._states.start + 1 + self.begin + self.state.length

    def text(self, history: Sequence[int]) -> Sequence[int]:
        """See Drafter. A row reads a token and the hidden state at the token before it."""
        if not self._states.reach(history):
            return ()
        if self._version != self._states.version:
            self._version, self._exact = self._states.version, 0
        self.state.truncate(min(self.state.length, self._exact))
        return history[self._states.start + 1 :]

    def extend(self, ids: Sequence[int], stopped: Callable[[], bool]) -> tuple[int, float]:
        """See Drafter."""
        set_torch_threads(len(ids), self._torch_threads)
        self.store.stopped = stopped
        try:
            for at in range(0, len(ids), PREFILL_CHUNK):
                self._last = self._extended(ids[at : at + PREFILL_CHUNK])[-1:]
            with torch.inference_mode():
                return most_probable(self._model.body.head(self._last)[0].float())
        except BaseException:
            self.store.abandon()
            raise
        finally:
            self.store.stopped = lambda: False

    def _extended(self, ids: Sequence[int]) -> Tensor:
        """Append rows of these tokens; return their outputs [T, D]."""
        states, past, body = self._states, self.state.length, self._model.body
        first = states.start + self.begin + past
        with torch.inference_mode():
            known = first + len(ids) <= states.end
            assert known or len(ids) == 1, "only one row at a time reads an output of the last"
            hidden = body.norm(states.rows[first : first + len(ids)]) if known else self._last
            embedded = body.embedded(torch.tensor(ids))
        out = self._modules.extend(embedded, hidden, self.state, self.store)
        if known:
            self._exact = self.state.length
        return out


def open_mtp(plan: Plan, model: Model, opened: ExitStack) -> MtpEngine | None:
    """Load the modules of a plan; None without them. Raises DamagedModel."""
    modules, placement = plan.manifest.modules, plan.modules
    if modules is None or placement is None:
        return None
    assert isinstance(model, Decoder)
    values = read_json(plan.folder / CONFIG)
    whole = family_of(values)
    family = whole.mtp(whole.parse(values))
    assert family is not None
    own = replace(
        plan,
        manifest=modules,
        folder=plan.folder / MTP,
        placement=placement,
        config=draft_config(plan.config, placement.context, placement.threads),
        low=None,
        draft=None,
        modules=None,
    )
    tiers = open_tiers(own, opened)
    weights = DenseWeights(own.folder, modules, own.config, tiers.reading)
    opened.callback(weights.close)
    built = family.build(family.parse(values), weights)
    assert isinstance(built, MtpModules)
    warm_up(tiers)
    cost = token_bytes(modules) / token_bytes(plan.manifest)
    dtype = model.body.embedding.dtype
    states = TextStates(placement.context, plan.manifest.hidden_width, dtype)
    engine = MtpEngine(built, model, tiers.store, states, cost, placement.threads)
    opened.callback(engine.close)
    return engine
