"""An engine of this process as a chat partner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from moeinf.cli.chat.backends import Fields, Pieces
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.generation.generate import Generation
from moeinf.runtime.generation.report import statistics, verbose_lines
from moeinf.runtime.requests import Form, Limits, Message, SamplingOptions
from moeinf.runtime.sizes import format_bytes


class LocalPartner:
    """A `Partner` that answers with an engine of this process."""

    def __init__(self, conversation: Conversation, engine: Engine) -> None:
        self._conversation = conversation
        self._engine = engine
        self.model = engine.info.name
        self._load_seconds = engine.info.load_seconds  # added to the first answer
        self.last: Generation | None = None

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
        return self._engine.info.choices

    @property
    def summary(self) -> str:
        info = self._engine.info
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

    def verbose(self) -> Fields:
        return verbose_lines(self._engine, self._said_last, self._load_seconds)

    def document(self) -> dict[str, Any]:
        answer = self._said_last
        return {
            "finish_reason": answer.finish_reason,
            "prompt_tokens": answer.prompt_tokens,
            "tokens": len(answer.tokens),
            "token_ids": answer.tokens,
            "stats": statistics(self._engine, answer),
        }

    def notes(self) -> list[str]:
        return self._engine.take_notes()

    def info(self) -> Fields:
        info = self._engine.info
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
        chosen = options.over(self._engine.info.sampling)
        return [(f.name, getattr(chosen, f.name)) for f in fields(chosen)]

    def template(self) -> str | None:
        return self._engine.tokenizer.chat_template

    def cache(self) -> Fields:
        store, info = self._engine.store, self._engine.info
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
