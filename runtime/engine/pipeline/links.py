"""The first stage's side: connect the further stages, check them, and use them as a last block."""

from __future__ import annotations

import itertools
import math
import socket
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moeinf.errors import Failure, Unavailable, reason
from moeinf.models.base import Experts, Model
from moeinf.models.layers.decoder import Decoder
from moeinf.models.layers.kv_cache import KvCache, PassRows, Piece, Span
from moeinf.offload.store.expert_store import ExpertStore, Stopped
from moeinf.runtime.config import PREFILL_CHUNK, EngineConfig, lossy_options
from moeinf.runtime.engine.opening import Plan
from moeinf.runtime.engine.pipeline.address import parse_address
from moeinf.runtime.engine.pipeline.cut import Part, cut, layers_of
from moeinf.runtime.engine.pipeline.messages import About, Begin, Pass, Reply, Rows, bytes_of
from moeinf.runtime.engine.pipeline.wire import GREETING_S, SILENCE_S, Lost, Wire
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.version import arithmetic, version
from moeinf.runtime.visible import visible

OPTION = "--experimental-pipeline"
_LOOK_S = 0.2  # between two looks whether a request was stopped


class StageLost(Unavailable):
    """A stage of a pipeline cannot be reached, has ended, or hangs."""

    code = "stage_lost"
    hint = "the same command once `moeinf stage` runs there"
    serve_hint = "start `moeinf stage` there again: the next request loads the model again"


class StagesDiffer(Unavailable):
    """Stages of a pipeline do not fit together."""

    code = "stages_differ"
    hint = "`moeinf stage` there with the same model, version and options"


class StageFailed(Failure):
    """A stage of a pipeline could not compute a pass; it goes on."""

    code = "stage_failed"
    hint = "`moeinf verify MODEL` on that machine"


@dataclass(frozen=True)
class Link:
    """A connected stage."""

    address: str
    wire: Wire
    about: About


def open_stages(
    manifest: Manifest,
    folder: Path,
    config: EngineConfig,
    key: str | None,
    opened: ExitStack,
) -> Stages | None:
    """Connect the further stages of a pipeline, and find which layers are left to this process.

    None: the config has no stages. Raises StageLost, StagesDiffer, CannotCut, InvalidValue.
    """
    if not config.stages:
        return None
    others = lossy_options(config.lossy)
    others += ["--device cuda"] if config.device == "cuda" else []
    others += ["--draft"] if config.draft is not None else []
    if others:
        raise InvalidValue(f"{OPTION} cannot be combined with {others[0]}")
    count, links = len(layers_of(manifest, folder).sparse), list[Link]()
    for address in config.stages:
        link = _connected(address, key, opened)
        _check(link, manifest, config)
        links.append(link)
    links.sort(key=lambda link: link.about.first)
    ends = [link.about.first for link in links[1:]] + [count]
    for link, end in zip(links, ends, strict=True):
        if link.about.stop < end:
            raise StagesDiffer(f"no stage has the layers {_range(link.about.stop, end)}")
        if link.about.stop > end:
            raise StagesDiffer(f"two stages have the layers {_range(end, link.about.stop)}")
    if not links[0].about.first:
        raise StagesDiffer(f"the stage at {links[0].address} has layer 0, which belongs here")
    return Stages(links, cut(manifest, folder, 0, links[0].about.first), config)


def _connected(address: str, key: str | None, opened: ExitStack) -> Link:
    """Return a stage whose key is proved. opened: closes the connection. Raises StageLost."""
    where = parse_address(OPTION, address, key)
    try:
        end = socket.create_connection(where, GREETING_S)
    except OSError as error:
        raise StageLost(f"the stage at {address} cannot be reached: {reason(error)}") from error
    opened.callback(end.close)
    try:
        wire = Wire(end, SILENCE_S)
        wire.prove(key, first=True)
        return Link(address, wire, wire.receive(About, GREETING_S))
    except Lost as error:
        words = f"the stage at {address} does not take this process: {error}"
        found = StageLost(f"{words} (is its MOEINF_STAGE_KEY the same, and is no other with it?)")
        raise found from error


def _range(first: int, stop: int) -> str:
    return f"{first}-{stop - 1}"


def _check(link: Link, manifest: Manifest, config: EngineConfig) -> None:
    """Raise StagesDiffer unless a stage is of the same version, model and configuration."""
    about, where = link.about, f"the stage at {link.address}"
    if about.version != version():
        raise StagesDiffer(f"{where} is moeinf {visible(about.version)}, not {version()}")
    if about.digest != manifest.digest:
        other = f"other files of {about.model}"
        other = other if about.model == str(manifest.model) else about.model
        raise StagesDiffer(f"{where} has {visible(other)}, not {manifest.model}")
    if about.kv != config.kv:
        raise StagesDiffer(f"{where} has --kv {about.kv}, not {config.kv}")
    if about.parallel < config.parallel:
        raise StagesDiffer(
            f"{where} takes {about.parallel} requests together, not {config.parallel}: set "
            "MOEINF_NUM_PARALLEL there, too"
        )
    if config.context is not None and about.context < config.context:
        raise StagesDiffer(f"{where} has --ctx {about.context}, less than {config.context}")


class Stages:
    """The further stages, as the last block of a decoder.

    A stage knows a state by a number, which is free again when the state is gone. Once a stage is
    lost, its states are, too: every later pass fails, and the engine has to be opened again.
    """

    def __init__(self, links: Sequence[Link], own_part: Part, config: EngineConfig) -> None:
        self._links, self.own_part = tuple(links), own_part
        self.config = replace(
            config, trace=False, prefix=None, speculation=False, mtp=False, device="cpu"
        )
        self.window = min(link.about.window for link in links)
        self._states: weakref.WeakKeyDictionary[KvCache, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count(1)
        self._store: ExpertStore | None = None
        self._lost: str | None = None

    @property
    def lost(self) -> bool:
        return self._lost is not None

    def follow(self, model: Model, store: ExpertStore, plan: Plan) -> Plan:
        """Become the last block of the model, and tell the stages its context.

        Returns the plan with that context, which is the least of all. Raises StageLost.
        """
        assert isinstance(model, Decoder)
        self._store = store
        context = min(plan.placement.context, *(link.about.context for link in self._links))
        for link in self._links:
            try:
                link.wire.send(Begin(context))
            except Lost as error:
                raise self._end(link, error) from error
        model.add_block(self)
        store.warm(range(self.own_part.layers * self.own_part.experts))
        there = (
            f"{_range(link.about.first, link.about.stop)} at {link.address}" for link in self._links
        )
        where = f"layers 0-{self.own_part.last} here, {', '.join(there)}"
        plan.notes.append(
            f"experimental pipeline: {where}; without drafts, MTP, prefix cache and records"
        )
        for link in self._links:
            theirs = link.about.arithmetic
            if theirs != arithmetic():
                plan.notes.append(
                    f"the stage at {link.address} computes with {visible(theirs)}, not "
                    f"{arithmetic()}: answers may differ from those of one engine"
                )
        return replace(plan, placement=replace(plan.placement, context=context))

    def __call__(self, x: Tensor, rows: PassRows, experts: Experts) -> Tensor:
        """Map [T, D] to [T, D]; see models.layers.decoder.Block."""
        return self._through(x, [(span.cache, span.past, span.count) for span in rows.spans], False)

    def over(self, x: Tensor, pieces: Sequence[Piece], experts: Experts) -> Tensor:
        """See models.layers.decoder.Block."""
        parts = [span for _, rows in pieces for span in rows.spans]
        found = [
            (cache, spans[0].past, sum(span.count for span in spans))
            for cache, group in itertools.groupby(parts, _cache)
            for spans in [list(group)]
        ]
        return self._through(x, found, True)

    def _through(
        self, x: Tensor, parts: Sequence[tuple[KvCache, int, int]], pieces: bool
    ) -> Tensor:
        rows = tuple(
            Rows(self._number(cache), cache.request, past, count) for cache, past, count in parts
        )
        for link in self._links:
            if self._lost is not None:
                raise StageLost(self._lost)
            try:
                x = self._passed(link, x.contiguous(), rows, pieces)
            except (StageFailed, Stopped):
                raise
            except Lost as error:
                raise self._end(link, error) from error
            except BaseException:  # its answer would come into the next pass
                self._end(link, Lost("a pass was interrupted"))
                raise
        return x

    def _passed(self, link: Link, x: Tensor, rows: tuple[Rows, ...], pieces: bool) -> Tensor:
        """Compute the layers of one stage. Raises Lost, StageFailed, Stopped."""
        assert self._store is not None
        number, wire, stopped = next(self._numbers), link.wire, False
        patience_s = wire.silence_s * math.ceil(len(x) / PREFILL_CHUNK)  # it tells of each layer
        wire.send(Pass(number, rows, pieces), bytes_of(x))
        until = time.monotonic() + patience_s
        while True:
            if wire.arrives(_LOOK_S):
                reply = wire.receive(Reply)
                if reply.number != number:
                    raise Lost("it answers another pass")
                if reply.what != "busy":
                    break
                if not stopped:
                    until = time.monotonic() + patience_s
            if time.monotonic() > until:
                words = "it does not stop" if stopped else "nothing has come from it"
                raise Lost(f"{words} for {patience_s:g} s")
            if not stopped and self._store.stopped():
                stopped = True
                wire.send(Pass(number, (), False))
        if reply.what == "done":
            x = torch.empty_like(x)
            wire.receive_into(bytes_of(x))
        if stopped:
            raise Stopped
        if reply.what == "failed":
            raise StageFailed(f"the stage at {link.address}: {visible(reply.words)}")
        return x

    def _number(self, cache: KvCache) -> int:
        """Return the number of a state, the first that is free for a new one."""
        if cache not in self._states:
            free = set(range(self.config.parallel)) - set(self._states.values())
            assert free, "a state more than `parallel`"
            self._states[cache] = min(free)
        return self._states[cache]

    def _end(self, link: Link, error: Lost) -> StageLost:
        """Note that a stage is lost, and return the error."""
        self._lost = f"the stage at {link.address} is lost: {error}"
        for each in self._links:
            each.wire.close()
        return StageLost(self._lost)


def _cache(span: Span) -> KvCache:
    return span.cache
