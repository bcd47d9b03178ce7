"""Facts of one open engine, for the CLI and the server. A move of its memory makes new ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moeinf.runtime.config import PREFILL_CHUNK, Kv
from moeinf.runtime.library.defaults import Defaults
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.names import ModelName
from moeinf.runtime.placement.plan import Placement
from moeinf.runtime.requests import Limits, SamplingOptions


@dataclass(frozen=True)
class EngineInfo:
    """The model, its placement and its defaults. Sizes are in bytes, contexts in tokens.

    choices: one line per decision of the load, for a CLI or server to print.
    """

    manifest: Manifest
    folder: Path  # with the model's files
    placement: Placement
    policy: str  # cache policy of the expert slots, as configured
    sampling: SamplingOptions  # the model's defaults
    limits: Limits  # the same
    ends: frozenset[int]  # token ids that end an answer
    vocab_size: int
    reads_sources: bool  # an encoder-decoder: a state needs a source before `extend`
    digest: str  # of the model's files; see Manifest.digest
    lossy: Mapping[str, float] = field(default_factory=dict)  # see EngineConfig.lossy
    choices: tuple[str, ...] = ()
    load_seconds: float = 0.0
    peak_bytes: int = 0  # of the whole process, imports included
    reproducible: bool = False  # see EngineConfig
    drafts: bool = False  # a pass may check drafted tokens; see opening.may_draft

    @property
    def name(self) -> ModelName:
        return self.manifest.model

    @property
    def defaults(self) -> Defaults | None:
        """The values of requests that name no others; None: none from `moeinf create`."""
        return self.manifest.defaults

    @property
    def family(self) -> str:
        return self.manifest.family

    @property
    def format(self) -> str:
        """The format of the weights, for example F32, BF16 or Q8."""
        return self.manifest.dtype

    @property
    def experts(self) -> int:
        """The number of experts in all layers."""
        return self.manifest.slots.experts

    @property
    def context(self) -> int:
        return self.placement.context

    @property
    def kv(self) -> Kv:
        """The form of the KV cache: see EngineConfig."""
        return self.placement.kv

    @property
    def prefix_grain(self) -> int:
        """The tokens of a KV cache that a request reuses are a multiple of it."""
        return PREFILL_CHUNK if self.reproducible else 1

    @property
    def threads(self) -> int:
        return self.placement.threads

    @property
    def device(self) -> str:
        """The processor of experts and dense weights: cpu or cuda."""
        return self.placement.device

    @property
    def slots(self) -> int:
        """The number of expert slots in host memory."""
        return self.placement.slots

    @property
    def slot_bytes(self) -> int:
        return self.placement.slot_bytes

    @property
    def experts_bytes(self) -> int:
        """The size of all host slots in bytes."""
        return self.placement.experts_bytes
