"""Log-probabilities of tokens as text, in both APIs' forms.

The bytes of all tokens together are those of the text: special tokens have no bytes.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

from moeinf.runtime.generation.events import TokenInfo

if TYPE_CHECKING:
    from moeinf.runtime.engine.engine import Engine

_LEAST = -9999.0  # OpenAI's value for impossible tokens; JSON has no infinity


def token_words(engine: Engine, info: TokenInfo) -> dict[str, Any]:
    """Return a token of a chat, and the most probable ones in its place."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        data = engine.tokenizer.piece(token)
        return {"token": _text(data), "logprob": max(logprob, _LEAST), "bytes": list(data)}

    best = [one(token, logprob) for token, logprob in info.best]
    return {**one(info.token, info.logprob), "top_logprobs": best}


class LegacyWords:
    """The form of OpenAI's completions: lists that continue from chunk to chunk of one answer."""

    def __init__(self) -> None:
        self._characters = 0  # whole ones, before the next token
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, found: list[tuple[Engine, TokenInfo]]) -> dict[str, Any]:
        """Return the next tokens; among alternatives with equal texts, the most probable."""
        tokens, offsets, top = [], [], []
        for engine, info in found:
            data = engine.tokenizer.piece(info.token)
            tokens.append(_text(data))
            offsets.append(self._characters)
            self._characters += len(self._decoder.decode(data))
            best: dict[str, float] = {}
            for token, logprob in info.best:
                best.setdefault(_text(engine.tokenizer.piece(token)), max(logprob, _LEAST))
            top.append(best)
        return {
            "tokens": tokens,
            "token_logprobs": [max(info.logprob, _LEAST) for _, info in found],
            "top_logprobs": top,
            "text_offset": offsets,
        }


def _text(data: bytes) -> str:
    """Return a token's text alone: a part of a character is U+FFFD."""
    return data.decode("utf-8", "replace")
