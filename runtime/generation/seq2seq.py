"""Requests to an encoder-decoder: each text is read whole and answered alone.

There are no turns: earlier questions have no effect, and there is no system message.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moeinf.errors import UnusableInput
from moeinf.models.seq2seq.encoder_decoder import EncoderDecoder
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.generation.events import Request
from moeinf.runtime.generation.generate import Generation
from moeinf.runtime.requests import Limits, Message, PromptTooLong, SamplingOptions
from moeinf.runtime.sampling.grammar import BadFormat

DEFAULT_LANGUAGE = "eng_Latn"
_CODE = re.compile("[a-z]{3}_[A-Z][a-z]{3}")  # FLORES-200


class BadLanguage(UnusableInput, ValueError):
    """The model lacks the language, or takes no languages."""

    code = "bad_language"
    hint = "codes like eng_Latn and fra_Latn"


@dataclass(frozen=True)
class Languages:
    """Codes as in FLORES-200 (eng_Latn); None: not given."""

    source: str | None = None
    target: str | None = None


def converse(
    engine: Engine, system: str = "", now: str | None = None, languages: Languages | None = None
) -> Conversation:
    """Return a conversation with a decoder, or requests to an encoder-decoder.

    Raises BadLanguage.
    """
    model, languages = engine.model, languages or Languages()
    if isinstance(model, EncoderDecoder):
        return Sources(engine, model, languages)
    if languages != Languages():
        raise BadLanguage(f"{engine.info.name} does not translate: leave out --src and --tgt")
    return Conversation(engine, system, now)


class Sources(Conversation):
    """Requests whose every `ask` is a source of its own; `complete` is the same."""

    def __init__(self, engine: Engine, model: EncoderDecoder, languages: Languages) -> None:
        super().__init__(engine)
        self._begin = [model.start_token]
        self._source_token: int | None = None
        if model.names_languages:
            if languages.target is None:
                raise BadLanguage("the target language is missing (for example --tgt fra_Latn)")
            self._source_token = _token(engine, languages.source or DEFAULT_LANGUAGE)
            self._begin.append(_token(engine, languages.target))
        elif languages != Languages():
            raise BadLanguage(f"{engine.info.name} does not translate: leave out --src and --tgt")

    def ask(
        self,
        text: str,
        options: SamplingOptions,
        limits: Limits,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Generation:
        """Answer one source, see Conversation.ask; messages keep this question and answer."""
        generation = self._reply(text, options, limits, stopped)
        self.messages = [Message("user", text)]
        return generation

    def complete(
        self,
        text: str,
        options: SamplingOptions,
        limits: Limits,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Generation:
        return self._reply(text, options, limits, stopped)

    def source(self, text: str) -> list[int]:
        """Return the token ids of a text for the encoder."""
        tokenizer = self._engine.tokenizer
        if self._source_token is None:
            return tokenizer.encode_text(text)  # with sentinels as special tokens
        return tokenizer.encode_source(text, self._source_token)

    def _reply(
        self,
        text: str,
        options: SamplingOptions,
        limits: Limits,
        stopped: Callable[[], bool],
    ) -> Generation:
        if self.form:
            raise BadFormat("format is not supported by an encoder-decoder")
        source = self.source(text)
        context = self._engine.info.context
        if len(source) > context:
            raise PromptTooLong(f"the text has {len(source)} tokens, the context {context}")

        def settle(generation: Generation) -> None:
            self.messages = [*self.messages[:1], Message("assistant", generation.text)]

        request = Request(lambda _: self._begin, options, limits, source=source, stopped=stopped)
        return self._generation(request, settle)


def _token(engine: Engine, code: str) -> int:
    """Return the token of a language. Raises BadLanguage with the nearest ones."""
    known: Sequence[str] = [t for t in engine.tokenizer.special_tokens if _CODE.fullmatch(t)]
    found = engine.tokenizer.token_id(code) if code in known else None
    if found is None:
        near = difflib.get_close_matches(code, known, 3) or sorted(known)[:3]
        raise BadLanguage(
            f"{code!r} is not a language of the model; the nearest: {', '.join(near)}"
        )
    return found
