"""The routed experts in plain torch: grouping, combining, and the reference store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from moeinf.models.base import Activation, Experts, MoeShape, Pending, Phase
from moeinf.models.config import MAX_EXPERTS, MAX_WIDTH, Fields, require
from moeinf.models.layers.ffn import expert_ffn
from moeinf.models.layers.routing import HashRouter

Router = Callable[[Tensor], tuple[Tensor, Tensor]]  # [T, D] -> ids [T, K], weights [T, K]


def parse_moe(fields: Fields, layers: int, hidden: int, intermediate: str) -> MoeShape:
    """Read the sizes of `layers` MoE layers, in any spelling; raise ModelDataError.

    intermediate: the config key of one expert's intermediate size.
    """
    shape = MoeShape(
        layers=layers,
        experts=fields.integer(
            *("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
            high=MAX_EXPERTS,
        ),
        top_k=fields.integer(
            *("num_experts_per_tok", "experts_per_token", "moe_k", "moe_topk", "top_k_experts"),
            high=MAX_EXPERTS,
        ),
        hidden=hidden,
        intermediate=fields.integer(intermediate, high=MAX_WIDTH),
    )
    require(shape.layers > 0, "no layer has experts")
    require(
        shape.top_k <= shape.experts,
        f"{shape.top_k} experts per token are more than the {shape.experts} experts of a layer",
    )
    return shape


def group(ids: Tensor, experts: int) -> list[tuple[int, list[int]]]:
    """Group ids [T, K] by distinct expert, ascending: its number and its places t·K + k, ascending.

    -1 belongs to no group. Raises ValueError for other ids outside 0 … experts - 1. Lists handle
    one row's few numbers in some microseconds, where a dozen torch calls take a hundred.
    """
    found: dict[int, list[int]] = {}
    for place, expert in enumerate(ids.flatten().tolist()):
        found.setdefault(expert, []).append(place)
    found.pop(-1, None)
    if found and not (min(found) >= 0 and max(found) < experts):
        raise ValueError(
            f"expert ids must lie in 0 … {experts - 1}, got {min(found)} … {max(found)}"
        )
    return sorted(found.items())


def combine(rows: Tensor, weights: Tensor) -> Tensor:
    """Sum rows [T, K, D] by weights [T, K] f32 -> [T, D] of rows' dtype, k by k in float32.

    Multiplying and adding are separate operations, so that a row's sum does not depend on its
    position in the tensor.
    """
    total = rows[:, 0].float() * weights[:, 0, None]  # [T, D]
    for k in range(1, rows.shape[1]):
        total += rows[:, k].float() * weights[:, k, None]
    return total.to(rows.dtype)


class TorchMath:
    """These functions as one object, for a store that is handed its arithmetic."""

    def __init__(self, activation: Activation = "swiglu") -> None:
        self._activation = activation

    def ffn(self, x: Tensor, *weights: Tensor) -> Tensor:
        return expert_ffn(self._activation, x, *weights)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        return combine(rows, weights)


@dataclass(frozen=True)
class Done:
    """A Pending that is already computed."""

    value: Tensor

    def result(self) -> Tensor:
        return self.value


class ResidentExperts:
    """All experts in memory: the reference that every other `Experts` must agree with."""

    wants_hints = False

    def __init__(
        self,
        weights: Mapping[tuple[int, int], tuple[Tensor, ...]],
        activation: Activation = "swiglu",
    ) -> None:
        """Map (layer, expert) to the arguments of ffn.expert_ffn.

        One example is (gate_up [2F, D], down [D, F]).
        """
        self._weights = weights
        self._activation = activation
        self._experts = 1 + max(expert for _, expert in weights)
        self._pieces: Sequence[slice] = (slice(None),)

    def begin_pass(self, rows: Tensor, phase: Phase, pieces: Sequence[slice] = ()) -> None:
        """Keep the pieces."""
        self._pieces = pieces or (slice(None),)

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Done:
        """Compute at once. Raises KeyError for an absent expert."""
        done = [self._piece(layer, x[r], ids[r], weights[r]) for r in self._pieces]
        return Done(torch.cat(done))

    def _piece(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        rows = x.new_zeros(ids.numel(), x.shape[1])  # [T·K, D]; places without an expert stay 0
        for expert, found in group(ids, self._experts):
            places = torch.tensor(found)
            mine = x[places // ids.shape[1]]
            rows[places] = expert_ffn(self._activation, mine, *self._weights[layer, expert])
        return combine(rows.view(*ids.shape, -1), weights)

    def hint(self, layer: int, ids: Tensor, scores: Tensor) -> None:
        """Do nothing: there is nothing to prefetch."""

    def end_pass(self, accepted_rows: Tensor | None = None) -> None:
        """Do nothing: there is nothing to record."""


@dataclass
class Ending:
    """The end of an open pass. accepted: see Experts.end_pass."""

    accepted: Tensor | None = None


@contextmanager
def one_pass(
    experts: Experts, rows: Tensor, phase: Phase, pieces: Sequence[slice] = ()
) -> Iterator[Ending]:
    """Open a pass, and close it; after an error its rows are not accepted."""
    experts.begin_pass(rows, phase, *([pieces] if pieces else []))
    ending = Ending()
    try:
        yield ending
    except BaseException:
        experts.end_pass(torch.zeros(len(rows), dtype=torch.bool))
        raise
    experts.end_pass(ending.accepted)


@dataclass(frozen=True)
class SparseFfn:
    """One MoE layer: routed experts, and shared ones that run while the routed are in flight.

    ahead is the router of the next MoE layer. Its output for this layer's input predicts its
    output for its own input. The reason is that the residual stream changes little from layer to
    layer (Eliseev and Mazur, arXiv 2312.17238, section 3.2).
    """

    layer: int  # the flat MoE-layer index
    router: Router | HashRouter
    shared: Callable[[Tensor], Tensor] | None = None
    ahead: Router | HashRouter | None = None
    before: Callable[[Tensor], Tensor] | None = None  # of the routed experts' input alone
    after: Callable[[Tensor], Tensor] | None = None  # of their weighted sum alone

    def __call__(self, x: Tensor, experts: Experts, tokens: Tensor | None = None) -> Tensor:
        """Return the layer's output: [T, D] -> [T, D]; tokens [T]: ids, for a HashRouter."""
        return self.over(x, (slice(None),), experts, tokens)

    def finish(self, x: Tensor, pending: Pending) -> Tensor:
        """Return the output of a layer whose routed experts have been submitted."""
        return self._joined(x, (slice(None),), pending)

    def over(
        self,
        x: Tensor,
        pieces: Sequence[slice],
        experts: Experts,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output for several pieces, each as if computed alone."""
        return self._joined(x, pieces, self.start(x, experts, pieces, tokens))

    def _joined(self, x: Tensor, pieces: Sequence[slice], pending: Pending) -> Tensor:
        shared = None if self.shared is None else _each(self.shared, x, pieces)
        routed = pending.result()
        if self.after is not None:
            routed = _each(self.after, routed, pieces)
        return routed if shared is None else routed + shared

    def start(
        self,
        x: Tensor,
        experts: Experts,
        pieces: Sequence[slice] = (slice(None),),
        tokens: Tensor | None = None,
    ) -> Pending:
        """Submit only the routed experts of x [T, D], for a layer that does more meanwhile."""
        chosen = _over(self.router, x, pieces, tokens)
        return self.submit(x, *chosen, experts, pieces, tokens)

    def submit(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: Experts,
        pieces: Sequence[slice] = (slice(None),),
        tokens: Tensor | None = None,
    ) -> Pending:
        """Submit the routed experts of x [T, D], which the router has chosen."""
        if self.ahead is not None and experts.wants_hints:
            experts.hint(self.layer + 1, *_over(self.ahead, x, pieces, tokens))
        if self.before is not None:
            x = _each(self.before, x, pieces)
        return experts.submit(self.layer, x, ids, weights)


def _each(step: Callable[[Tensor], Tensor], x: Tensor, pieces: Sequence[slice]) -> Tensor:
    """Return step(x) [T, D], each piece as if computed alone."""
    if len(pieces) == 1:
        return step(x)
    return torch.cat([step(x[r]) for r in pieces])


def _over(
    router: Router | HashRouter, x: Tensor, pieces: Sequence[slice], tokens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the ids and weights [T, K] of all pieces of x [T, D]."""

    def routed(rows: slice) -> tuple[Tensor, Tensor]:
        if not isinstance(router, HashRouter):
            return router(x[rows])
        assert tokens is not None
        return router(x[rows], tokens[rows])

    if len(pieces) == 1:
        return routed(pieces[0])
    ids, weights = zip(*map(routed, pieces), strict=True)
    return torch.cat(ids), torch.cat(weights)
