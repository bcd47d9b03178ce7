"""An engine of this process as a chat partner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from moeinf.cli.chat.backends import Fields, Pieces, memory_words
from moeinf.cli.chat.signals import Leave
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.generation.generate import Generation
from moeinf.runtime.generation.report import statistics, verbose_lines
from moeinf.runtime.generation.seq2seq import Languages, converse
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.requests import Form, Limits, Message, SamplingOptions
from moeinf.runtime.sizes import format_bytes, parse_memory_or_auto
from moeinf.runtime.text.reasoning import thinks


@dataclass(frozen=True)
class Opener:
    """Open an engine with the options of the command line."""

    config: EngineConfig
    settings: Settings
    now: str | None = None  # the date that templates see
    languages: Languages | None = None

    def open(self, manifest: Manifest, folder: Path) -> Engine:
        """Load a model. Raises as Engine.open."""
        return Engine.open(manifest, folder, self.config, self.settings)


class LocalPartner:
    """A `Partner` that answers with an engine of this process. Close it after use."""

    def __init__(self, engine: Engine, opener: Opener) -> None:
        """Take an engine. opener: opens those that replace it. Raises BadLanguage."""
        self._take(engine, opener)

    def _take(self, engine: Engine, opener: Opener) -> None:
        try:
            talk = converse(engine, now=opener.now, languages=opener.languages)
        except BaseException:
            engine.close()
            raise
        self._opener = opener
        self._opened: tuple[Engine, Conversation] | None = engine, talk
        self.model = engine.info.name
        self._load_seconds = engine.info.load_seconds  # added to the first answer
        self.last: Generation | None = None

    def close(self) -> None:
        """Release the engine and its memory."""
        if self._opened is not None:
            engine = self.engine
            self._opened = self.last = None  # the KV cache goes first
            engine.close()

    def __enter__(self) -> LocalPartner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ready(self) -> bool:
        return self._opened is not None

    @property
    def engine(self) -> Engine:
        assert self._opened is not None
        return self._opened[0]

    @property
    def _conversation(self) -> Conversation:
        assert self._opened is not None
        return self._opened[1]

    def load(self, model: str) -> None:
        manifest, folder = Library(self._opener.settings).read(model)
        if manifest.model != self.model:
            self._reopen(self._opener, manifest, folder)
        self.clear()
        if not thinks(self.template()):
            self.think = None

    def resize(self, context: int) -> None:
        config = replace(self._opener.config, context=context)
        info = self.engine.info
        self._reopen(replace(self._opener, config=config), info.manifest, info.folder)

    def _reopen(self, opener: Opener, manifest: Manifest, folder: Path) -> None:
        """Load a model in place of this one, and keep the turns.

        The old engine is closed first, because there may be no memory for both. If the new one
        fails, the old one is opened again.
        """
        old, info = self._opener, self.engine.info
        held = self._conversation
        turns = held.system, held.think, held.form, held.messages, held.dropped, held.kept
        del held
        self.close()
        try:
            self._take(opener.open(manifest, folder), opener)
        except Leave:
            raise
        except BaseException:
            self._take(old.open(info.manifest, info.folder), old)
            raise
        finally:
            if self._opened is not None:
                held = self._conversation
                held.system, held.think, held.form, held.messages, held.dropped, held.kept = turns

    @property
    def system(self) -> str:
        return self._conversation.system

    @system.setter
    def system(self, text: str) -> None:
        self._conversation.system = text

    @property
    def think(self) -> bool | None:
        return self._conversation.think

    @think.setter
    def think(self, whether: bool | None) -> None:
        self._conversation.think = whether

    @property
    def form(self) -> Form:
        return self._conversation.form

    @form.setter
    def form(self, form: Form) -> None:
        self._conversation.form = form

    @property
    def kept(self) -> bool:
        return self._conversation.kept

    @kept.setter
    def kept(self, whether: bool) -> None:
        self._conversation.kept = whether

    @property
    def reading(self) -> Callable[[int, int], None]:
        return self._conversation.reading

    @reading.setter
    def reading(self, reading: Callable[[int, int], None]) -> None:
        self._conversation.reading = reading

    @property
    def messages(self) -> list[Message]:
        return self._conversation.messages

    @messages.setter
    def messages(self, messages: list[Message]) -> None:
        self._conversation.messages = messages

    @property
    def dropped(self) -> int:
        return self._conversation.dropped

    def clear(self) -> None:
        self._conversation.clear()

    @property
    def finish_reason(self) -> str:
        return self._said_last.finish_reason

    @property
    def choices(self) -> Sequence[str]:
        return self.engine.info.choices

    @property
    def summary(self) -> str:
        info = self.engine.info
        place, experts = info.placement, info.experts
        where, above = "CPU", place.on_device
        if above is not None:
            where = f"{above.gpu} with {min(above.slots, experts)} of {experts} experts"
        count = "all" if place.slots >= experts else f"{place.slots} of {experts}"
        return f"{info.name} · {where} · {count} experts in RAM · context {info.context}"

    @property
    def _said_last(self) -> Generation:
        assert self.last is not None  # a question was asked before
        return self.last

    def say(
        self,
        text: str,
        options: SamplingOptions,
        limits: Limits,
        stopped: Callable[[], bool],
        raw: bool = False,
    ) -> Pieces:
        if self.last is not None:
            self._load_seconds = 0.0
        ask = self._conversation.complete if raw else self._conversation.ask
        self.last = ask(text, options, limits, stopped)
        for kind, piece in self._conversation.pieces(self.last):
            yield "answer" if kind == "answer" else "thinking", piece

    def set_memory(self, text: str) -> str:
        self.engine.set_memory(parse_memory_or_auto(text))
        info = self.engine.info
        said = {"memory": info.experts_bytes, "slots": info.slots, "experts": info.experts}
        return memory_words(said)

    def verbose(self) -> Fields:
        return verbose_lines(self.engine, self._said_last, self._load_seconds)

    def document(self) -> dict[str, Any]:
        answer = self._said_last
        return {
            "finish_reason": answer.finish_reason,
            "prompt_tokens": answer.prompt_tokens,
            "tokens": len(answer.tokens),
            "token_ids": answer.tokens,
            "stats": statistics(self.engine, answer),
        }

    def notes(self) -> list[str]:
        return self.engine.take_notes()

    def info(self) -> Fields:
        info = self.engine.info
        m = info.manifest
        return [
            ("model", str(info.name)),
            ("family", info.family),
            ("experts", f"{m.layers} MoE layers, {m.experts} experts each, {m.top_k} per token"),
            ("context", f"{info.context} tokens"),
            ("source", m.source),
            *(("chosen", choice) for choice in info.choices),
        ]

    def parameters(self, options: SamplingOptions) -> list[tuple[str, Any]]:
        chosen = options.over(self.engine.info.sampling)
        found = [(f.name, getattr(chosen, f.name)) for f in fields(chosen)]
        return [*found, ("num_ctx", self.engine.info.context)]

    def template(self) -> str | None:
        return self.engine.tokenizer.chat_template

    def default_system(self) -> str:
        given = self.engine.info.defaults
        return given.system or "" if given is not None else ""

    def cache(self) -> Fields:
        store, info = self.engine.store, self.engine.info
        used = format_bytes(store.resident * info.slot_bytes)
        total = format_bytes(info.experts_bytes)
        experts = info.experts
        rate, gpu = store.stats.hit_rate, info.placement.on_device
        above = []
        if gpu is not None:
            held = format_bytes(store.device_resident * gpu.slot_bytes)
            words = (
                f"{store.device_resident} of {experts}, {held} of {format_bytes(gpu.arena_bytes)}"
            )
            above = [("experts on the GPU", words)]
        return [
            *above,
            ("experts in RAM", f"{store.resident} of {experts}, {used} of {total}"),
            ("hit rate", "-" if rate is None else f"{rate:.1%}"),
            ("KV cache", f"{self._conversation.cached_tokens} of {info.context} tokens"),
        ]
