"""Let a server answer: `run` uses the one at MOEINF_HOST when it can.

Imports no torch, because the model is loaded in the server.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any, Literal

from moeinf.cli.chat.backends import Fields, Pieces, memory_words
from moeinf.cli.chat.client import Client, ServerError
from moeinf.runtime.config import Settings
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.processes import Figures, Registry
from moeinf.runtime.names import ModelName, parse_name
from moeinf.runtime.requests import Form, Limits, Message, PromptTooLong, SamplingOptions
from moeinf.runtime.sizes import format_bytes
from moeinf.runtime.text.reasoning import thinks

_NS = 1e9
_OF_AN_ENGINE = (
    "hit_rate bytes_read_per_token stall_share tokens_drafted tokens_accepted peak_rss_bytes "
    "experts_resident device kv lossy hits "
    "ahead_bytes prefetch_accuracy policy_us_per_token"
).split()


class RemotePartner:
    """A `Partner` on a server.

    ready: returns a client before each question. about: the document of /api/show for the model.
    keep_alive_s: how long the server keeps the model; None: the server's default.
    """

    def __init__(
        self,
        ready: Callable[[], Client],
        about: dict[str, Any],
        settings: Settings,
        keep_alive_s: float | None = None,
    ) -> None:
        self._ready = ready
        self._client = ready()
        self._about = about
        self._keep_alive = -1 if keep_alive_s == math.inf else keep_alive_s
        self._settings = settings  # a server on this machine registers in settings.run
        self.model: ModelName = parse_name(str(about["model"]))
        self.system = ""
        self.think: bool | None = None
        self.form: Form = None
        self.messages: list[Message] = []
        self.kept = False
        self.dropped = 0
        self.finish_reason = ""
        self.choices: Sequence[str] = ()
        self.ready = True
        self.reading: Callable[[int, int], None] = lambda _read, _all: None
        self._figures: dict[str, Any] = {}
        self._context: int | None = None  # the server's choice unless set

    def preload(self) -> None:
        """Make the server load the model while the user types. The first answer shows problems."""
        if self._keep_alive == 0:  # such a request would unload it
            return

        def load() -> None:
            body = {"model": str(self.model), "keep_alive": self._keep_alive}
            with suppress(ServerError, OSError):
                self._client.post("/api/generate", body)

        threading.Thread(target=load, daemon=True).start()

    def clear(self) -> None:
        self.messages.clear()
        self.dropped = 0

    def say(
        self,
        text: str,
        options: SamplingOptions,
        limits: Limits,
        stopped: Callable[[], bool],
        raw: bool = False,
    ) -> Pieces:
        """Yield the answer; drop the oldest turns when the context overflows.

        Raises ServerError.
        """
        self._client = self._ready()
        body = self._body(options, limits)
        if raw:
            yield from self._stream("/api/generate", {**body, "prompt": text, "raw": True}, stopped)
            return
        question = Message("user", text)
        while True:
            system = [Message("system", self.system)] if self.system else []
            turns = [*system, *self.messages, question]
            said = [{"role": m.role, "content": m.content} for m in turns]
            answer = ""
            try:
                for piece in self._stream("/api/chat", {**body, "messages": said}, stopped):
                    answer += piece[1] if piece[0] == "answer" else ""
                    yield piece
            except ServerError as error:
                if error.said != PromptTooLong.code or not self._drop_oldest():
                    raise
                continue
            self.messages += [question, Message("assistant", answer)]
            return

    def load(self, model: str) -> None:
        """Change to another model of the server, which loads it. Raises ServerError, BadName."""
        about = self._client.post("/api/show", {"model": model})
        name = parse_name(str(about.get("model")))
        if "completion" not in (about.get("capabilities") or ()):
            raise ServerError(f"{name} is an encoder-decoder: it needs an engine of its own")
        self._client.post("/api/generate", {"model": str(name), "stream": False})
        self._about, self.model, self._figures, self._context = about, name, {}, None
        self.clear()
        if not thinks(self.template()):
            self.think = None

    def resize(self, context: int) -> None:
        """Make the server load the model with another context. Raises ServerError, InvalidValue."""
        most = self._facts().get("context_length")
        if isinstance(most, int) and context > most:
            raise InvalidValue(f"num_ctx of {self.model} is at most {most}, got {context}")
        body = {"model": str(self.model), "stream": False, "options": {"num_ctx": context}}
        self._client.post("/api/generate", body)
        loaded = self._client.ask("GET", "/api/ps", {}).get("models") or ()
        sizes = [one.get("context_length") for one in loaded if one.get("name") == str(self.model)]
        if not any(isinstance(size, int) and size >= context for size in sizes):
            error = InvalidValue(f"`serve --ctx` bounds num_ctx of the server at {self._client}")
            alone = f"`moeinf run {self.model} --ctx {context}`"
            error.hint = f"{alone}, which loads an engine of its own"
            raise error
        self._context = context

    def set_memory(self, text: str) -> str:
        body = {"model": str(self.model), "memory": text}
        return memory_words(self._client.post("/api/memory", body))

    def verbose(self) -> Fields:
        f = self._figures
        lines = [
            ("total duration", _time(f.get("total_duration"))),
            ("load duration", _time(f.get("load_duration"))),
            ("prompt eval count", f"{f.get('prompt_eval_count', '-')} token(s)"),
            ("prompt eval duration", _time(f.get("prompt_eval_duration"))),
            ("prompt eval rate", _rate(f, "prompt_eval")),
            ("eval count", f"{f.get('eval_count', '-')} token(s)"),
            ("eval duration", _time(f.get("eval_duration"))),
            ("eval rate", _rate(f, "eval")),
        ]
        engine = self._engine()
        if engine is not None:
            rate = "-" if engine.hit_rate is None else f"{engine.hit_rate:.1%}"
            lines.append(("expert hit rate", f"{rate} (of all that the server has decoded)"))
            lines += [line for line in self.cache() if line[0].startswith("experts ")]
        return lines

    def document(self) -> dict[str, Any]:
        """Return the document; figures that only a local engine has are null."""
        f = self._figures
        steps, seconds = max(0, f.get("eval_count", 0) - 1), f.get("eval_duration", 0) / _NS
        return {
            "finish_reason": self.finish_reason,
            "prompt_tokens": f.get("prompt_eval_count", 0),
            "tokens": f.get("eval_count", 0),
            "token_ids": None,
            "server": str(self._client),
            "stats": {
                "ttft_ms": round(f.get("prompt_eval_duration", 0) / 1e6, 3),
                "tpot_ms": round(seconds / steps * 1e3, 3) if steps else None,
                "tokens_per_s": round(steps / seconds, 3) if steps and seconds else None,
                **dict.fromkeys(_OF_AN_ENGINE),
            },
        }

    @property
    def summary(self) -> str:
        context = "" if self._context is None else f" · context {self._context:,}"
        return f"{self.model} · the server at {self._client}{context}"

    def notes(self) -> list[str]:
        return []

    def info(self) -> Fields:
        found = self._facts()
        experts = (
            f"{found.get('block_count')} MoE layers, {found.get('expert_count')} experts each, "
            f"{found.get('expert_used_count')} per token"
        )
        return [
            ("model", str(self.model)),
            ("family", str(found.get("architecture"))),
            ("experts", experts),
            ("context", f"up to {found.get('context_length')} tokens"),
            ("server", str(self._client)),
        ]

    def parameters(self, options: SamplingOptions) -> list[tuple[str, Any]]:
        """Return the parameters set here; the server has the model's defaults."""
        found = [(f.name, getattr(options, f.name)) for f in fields(options)]
        return [*found, ("num_ctx", self._context)]

    def template(self) -> str | None:
        return self._about.get("template") or None

    def default_system(self) -> str:
        return str(self._about.get("system") or "")

    def cache(self) -> Fields:
        engine = self._engine()
        if engine is None:
            return [("experts", "the server is on another machine, or the model is not loaded")]
        rate = "-" if engine.hit_rate is None else f"{engine.hit_rate:.1%}"
        size = f"{format_bytes(engine.host_bytes)} of {format_bytes(engine.disk_bytes)}"
        held = (
            f"{engine.device_experts} of {engine.disk_experts}, {format_bytes(engine.device_bytes)}"
        )
        return [
            *([("experts on the GPU", held)] if engine.device == "cuda" else []),
            ("experts in RAM", f"{engine.host_experts} of {engine.disk_experts}, {size}"),
            ("hit rate", rate),
        ]

    def _body(self, options: SamplingOptions, limits: Limits) -> dict[str, Any]:
        chosen = {f.name: getattr(options, f.name) for f in fields(options)}
        said: dict[str, Any] = {k: v for k, v in chosen.items() if v is not None}
        if limits.max_tokens is not None:
            said["num_predict"] = limits.max_tokens
        if self._context is not None:
            said["num_ctx"] = self._context
        if limits.stop:
            said["stop"] = list(limits.stop)
        body: dict[str, Any] = {"model": str(self.model), "options": said}
        if not self.kept:
            body["keep_prefix"] = False
        if self.form is not None:
            body["format"] = self.form
        if self._keep_alive is not None:
            body["keep_alive"] = self._keep_alive
        return body if self.think is None else {**body, "think": self.think}

    def _stream(self, path: str, body: dict[str, Any], stopped: Callable[[], bool]) -> Pieces:
        self._figures, self.finish_reason = {}, "interrupted"
        kind: Literal["thinking", "answer"]
        for document in self._client.lines(path, body, stopped):
            if progress := document.get("prompt_progress"):
                self.reading(int(progress["processed"]), int(progress["total"]))
            message = document.get("message") or document
            for kind, names in (("thinking", ("thinking",)), ("answer", ("content", "response"))):
                text = next((message[name] for name in names if message.get(name)), "")
                if text:
                    yield kind, str(text)
            if document.get("done"):
                self._figures = document
                self.finish_reason = "stop" if document.get("done_reason") == "stop" else "length"
                return
        if not stopped():
            raise ServerError(f"the answer of {self._client} has no end")

    def _facts(self) -> dict[str, Any]:
        """Return the model's facts by their names without the prefix of the family."""
        facts = self._about.get("model_info") or {}
        return {key.rpartition(".")[2]: value for key, value in facts.items()}

    def _drop_oldest(self) -> bool:
        """Drop the oldest turn; False when no turn is left."""
        if not self.messages:
            return False
        later = [i for i, m in enumerate(self.messages) if m.role == "user" and i > 0]
        cut = later[0] if later else len(self.messages)
        self.messages = self.messages[cut:]
        self.dropped += cut
        return True

    def _engine(self) -> Figures | None:
        """Return the figures of the server's engine, or None if it is not on this machine."""
        engines = Registry(self._settings.run).engines()
        return next((e.figures for e in engines if e.model == str(self.model)), None)


def _time(nanoseconds: Any) -> str:
    if not isinstance(nanoseconds, int):
        return "-"
    seconds = nanoseconds / _NS
    return f"{seconds:.3f}s" if seconds >= 1 else f"{seconds * 1e3:.3f}ms"


def _rate(figures: dict[str, Any], name: str) -> str:
    """Return tokens per second; the first token of an answer counts as prefill."""
    count = figures.get(f"{name}_count", 0) - (name == "eval")
    seconds = figures.get(f"{name}_duration", 0) / _NS
    return f"{count / seconds:.2f} tokens/s" if seconds and count > 0 else "-"
