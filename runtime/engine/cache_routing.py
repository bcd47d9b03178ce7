"""Give every MoE layer of a model a router that prefers the experts in memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from moeinf.errors import UnusableInput
from moeinf.models.base import Piece
from moeinf.models.layers.cache_aware import CacheAwareRouter, always_kept
from moeinf.models.layers.moe import SparseFfn
from moeinf.models.layers.routing import (
    HashRouter,
    NormedRouter,
    SigmoidRouter,
    SoftmaxRouter,
    TopSoftmaxRouter,
)
from moeinf.offload.store.expert_store import ExpertStore
from moeinf.runtime.dense.cpu_backend import CpuMath
from moeinf.runtime.dense.cpu_fused import NativeRouter, RowRouter
from moeinf.runtime.library.manifest import Manifest


class CannotRoute(UnusableInput):
    """The router of a model does not allow `--route cache-aware`."""

    code = "cannot_route"
    hint = "--skip-below, which works with every model"


def check_route(manifest: Manifest) -> None:
    """Raise CannotRoute for a model whose routing cannot prefer experts."""
    problem = None
    if manifest.encoder_layers:
        problem = "it is an encoder-decoder"
    elif manifest.top_k <= always_kept(manifest.top_k):
        problem = "each token has one expert, which is always kept"
    elif manifest.top_k == manifest.experts:
        problem = "a token has all experts of a layer"
    elif manifest.family == "phimoe":
        problem = "phimoe defines the weights of the best two experts alone"
    if problem is not None:
        raise CannotRoute(f"--route cache-aware: {manifest.model} cannot use it ({problem})")


def _in_torch(router: Any) -> Any:
    return router.torch_router if isinstance(router, NativeRouter | RowRouter) else router


class CacheAwareMath(CpuMath):
    """The CPU's arithmetic, with cache-aware routers."""

    def __init__(self, store: ExpertStore, bonus: float) -> None:
        """Set up the arithmetic. bonus: see CacheAwareRouter."""
        self._store, self._bonus = store, bonus

    def tuned(self, piece: Piece) -> Piece:
        """See models.base.Parts.tuned."""
        if not isinstance(piece, SparseFfn) or isinstance(piece.router, HashRouter):
            return super().tuned(piece)
        exact = piece.router
        judge = _in_torch(exact)
        if isinstance(exact, NormedRouter):
            judge = replace(exact, inner=_in_torch(exact.inner))
        known = SoftmaxRouter | TopSoftmaxRouter | SigmoidRouter | NormedRouter
        assert isinstance(judge, known), type(judge)
        cheap = partial(self._cheap, piece.layer)
        router = CacheAwareRouter(exact, judge, self._bonus, cheap, self._replaced)
        return cast(Piece, replace(piece, router=router))

    def _cheap(self, layer: int) -> Tensor | None:
        here = self._store.host.preferred(layer)
        return None if here is None else torch.from_numpy(here)

    def _replaced(self, events: int) -> None:
        self._store.stats.decode_events_rerouted += events
