"""Force recorded routing onto a model of the same shape. Passes are repeated, not texts.

A replay measures a cache under routing recorded elsewhere. Every layer computes the recorded
experts with the weights of the model's own router. So the bytes and the arithmetic are real, but
the output is not meaningful text.

    model ──ids of its routers──▶ ForcedRouting ──recorded ids──▶ store

Hints are forced, too. The model's next-layer gates run as usual, and a HintSource
(offload/routing/hint_model.py) replaces their result. A replay is never traced, because its routing
is not the model's own and must not enter its EAMC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeinf.errors import UnusableInput
from moeinf.models.base import Experts, Pending, Phase
from moeinf.offload.routing.hint_model import HintSource
from moeinf.offload.routing.trace import Pass, Recording, RoutingShape
from moeinf.runtime.library.manifest import Manifest


class OtherShape(UnusableInput, ValueError):
    """A recording is of a model of another shape."""

    code = "other_shape"
    hint = "`moeinf trace MODEL --out FILE.eam`, which records that model"


@dataclass(frozen=True)
class Request:
    """The passes of one recorded request: any number of prompt passes and decode passes."""

    passes: tuple[Pass, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(done.rows) for done in self.passes if done.phase != "decode")

    @property
    def tokens(self) -> int:
        return sum(len(done.rows) for done in self.passes)


def fitted(recording: Recording, manifest: Manifest) -> Recording:
    """Return the recording with the model's sizes, cut to the model's layers.

    Raises OtherShape if the experts differ in number, or a token takes more of them than the
    model's tokens do. It is also raised if layers are missing or a pass cannot be repeated.
    """
    theirs = recording.shape
    if theirs.encoder_layers or any(done.phase == "encode" for done in recording.passes):
        raise OtherShape(f"{recording.name} was recorded with an encoder")
    if (
        theirs.layers < manifest.layers
        or theirs.experts != manifest.experts
        or theirs.top_k > manifest.top_k
    ):
        raise OtherShape(
            f"{recording.name} has {theirs.layers} layers of {theirs.experts} experts, "
            f"{theirs.top_k} per token; {manifest.model} has {manifest.layers} of "
            f"{manifest.experts}, {manifest.top_k} per token"
        )
    layers = manifest.layers
    shape = RoutingShape(
        layers, theirs.experts, theirs.top_k, 0,
        manifest.expert_bytes, manifest.dense_bytes,
    )  # fmt: skip
    passes = [
        replace(
            done,
            ids=done.ids[:layers],
            weights=None if done.weights is None else done.weights[:layers],
            hints=None if done.hints is None else done.hints[:layers],
        )
        for done in recording.passes
    ]
    return Recording(recording.name, shape, passes, recording.labels)


def first_requests(recording: Recording, count: int | None) -> Recording:
    """Return the first `count` requests of a recording; None: all of them."""
    if count is None or count >= len(recording.requests):
        return recording
    return recording.select(list(recording.requests)[:count])


def requests(recording: Recording) -> list[Request]:
    """Return the requests one by one; shared passes are split. Raises OtherShape without decode."""
    found = [Request(tuple(recording.select([r]).passes)) for r in recording.requests]
    if not any(done.phase == "decode" for request in found for done in request.passes):
        raise OtherShape(f"{recording.name} decodes nothing")
    return found


class ForcedRouting:
    """`Experts` that use the routing of `play`'s passes instead of the model's own."""

    def __init__(self, experts: Experts, hints: HintSource | None = None) -> None:
        self._experts, self._source = experts, hints
        self._ids = self._left = torch.empty(0, 0, 0)  # [L, T, K]: this pass, the rest
        self._hints: Tensor | None = None  # [L, T, H]
        self._left_hints: Tensor | None = None

    def play(self, done: Pass) -> None:
        """Repeat this pass in the following passes, which may divide its rows among them."""
        hinted = self._source.of_pass(done) if self._source is not None else None
        self._left = torch.from_numpy(done.ids).long()
        self._left_hints = None if hinted is None else torch.from_numpy(hinted).long()

    @property
    def wants_hints(self) -> bool:
        return self._hints is not None and self._experts.wants_hints

    def begin_pass(self, rows: Tensor, phase: Phase, pieces: Sequence[slice] = ()) -> None:
        count = len(rows)
        assert count <= self._left.shape[1], "more rows than were recorded"
        self._ids, self._left = self._left[:, :count].contiguous(), self._left[:, count:]
        if self._left_hints is not None:
            self._hints = self._left_hints[:, :count].contiguous()
            self._left_hints = self._left_hints[:, count:]
        else:
            self._hints = None
        self._experts.begin_pass(rows, phase, *([pieces] if pieces else []))

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Pending:
        forced = self._ids[layer].to(x.device)
        return self._experts.submit(layer, x, forced, weights[:, : forced.shape[1]].contiguous())

    def hint(self, layer: int, ids: Tensor, scores: Tensor) -> None:
        assert self._hints is not None
        forced = self._hints[layer].to(ids.device)
        self._experts.hint(layer, forced, forced.new_ones(forced.shape).float())  # all equal

    def end_pass(self, accepted_rows: Tensor | None = None) -> None:
        self._experts.end_pass(accepted_rows)
