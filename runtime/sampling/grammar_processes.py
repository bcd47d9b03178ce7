"""Lease processes that match answers against grammars.

A grammar comes with a request, so it is untrusted. One process per model reads the vocabulary,
which takes seconds and much memory, and stays. Each answer uses a copy of that process, a fork that
shares its memory. If a grammar crashes or never ends, only its own answer fails. A copy keeps its
compiled grammar and waits for the next answer to the same grammar.

    vocabulary ──copy──▶ grammar A, answers     ◀── lease ── an answer
               └─copy──▶ grammar B, waits idle  ◀── the next answer to B
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moeinf.runtime.limited_process import Channel, LimitedProcess, LimitExceeded, Refused
from moeinf.runtime.sampling.schema_limits import BadFormat

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_IDLE = 4
VOCABULARY_SECONDS = 60.0
COMPILE_SECONDS = 5.0
STEP_SECONDS = 5.0
_NO_TEXT = "NoExtensionBias"  # llguidance's error for a grammar that allows no text


class Grammars:
    """The grammar processes of one model. Not thread-safe: only the engine's thread uses it.

    end: the token that ends an answer, or None.
    """

    def __init__(self, tokenizer: Path, end: int | None) -> None:
        self._begin = {"tokenizer": str(tokenizer), "end": end}
        self._vocabulary: LimitedProcess | None = None
        self._reading = False  # the vocabulary, still in progress
        self._idle: dict[str, Channel] = {}  # by grammar, the least recently used first
        self._closed = False

    def lease(self, grammar: str, seconds: float) -> Channel | None:
        """Return a process for one answer, or None if it is not ready within `seconds`.

        Raises LimitExceeded or Refused when the vocabulary cannot be read.
        """
        found = self._idle.pop(grammar, None)
        if found is not None:
            if found.usable():  # the last answer to it may still be in flight
                return found
            found.close()
        vocabulary = self._vocabulary
        if vocabulary is not None and not (self._reading or vocabulary.usable()):
            vocabulary.close()  # it has died, possibly out of memory
        if vocabulary is None or vocabulary.closed:
            vocabulary = self._vocabulary = LimitedProcess("moeinf.runtime.sampling.grammar_worker")
            vocabulary.start(self._begin, VOCABULARY_SECONDS)
            self._reading = True
        if self._reading:
            if not vocabulary.done(seconds):
                return None
            self._reading = False
            try:
                vocabulary.result()
            except Refused:
                vocabulary.close()
                raise
        return vocabulary.copy()

    def release(self, grammar: str, process: Channel) -> None:
        """Keep a process for the next answer to the same grammar."""
        if self._closed or process.closed:
            process.close()
            return
        old = self._idle.pop(grammar, None)
        if old is not None:
            old.close()
        self._idle[grammar] = process
        if len(self._idle) > MOST_IDLE:
            self._idle.pop(next(iter(self._idle))).close()

    def close(self) -> None:
        """Kill all processes that are not leased. A leased process is killed on release."""
        self._closed = True
        for process in (*self._idle.values(), self._vocabulary):
            if process is not None:
                process.close()
        self._idle.clear()


class Matching:
    """The state of one answer in a grammar. Only `allowed` and `took` block.

    Every method raises BadFormat for a grammar that is invalid or exceeds its limits.
    """

    def __init__(self, grammars: Grammars, grammar: str) -> None:
        self._grammars, self._grammar = grammars, grammar
        self._process: Channel | None = None
        self._allowed: NDArray[np.bool_] | None = None

    def ready(self, seconds: float = 0.0) -> bool:
        """Wait at most `seconds` for the tokens that may come next; return False if not known."""
        if self._allowed is not None:
            return True
        try:
            if self._process is None:
                self._process = self._grammars.lease(self._grammar, seconds)
                if self._process is None:
                    return False
                self._process.start({"grammar": self._grammar}, COMPILE_SECONDS)
            if not self._process.done(seconds):
                return False
            self._allowed = _bits(self._process.result())
        except Refused as error:
            self._end()
            raise BadFormat(f"format: {_words(error)}") from None
        except LimitExceeded as error:
            self._end()
            raise BadFormat(f"format: the schema takes {error}") from None
        return True

    def allowed(self) -> NDArray[np.bool_]:
        """Wait for the tokens that may come next; return bool [vocab or more]."""
        while not self.ready(1.0):
            pass
        assert self._allowed is not None
        return self._allowed

    def took(self, token: int) -> None:
        """Advance past a token."""
        allowed = self.allowed()
        if not (token < len(allowed) and allowed[token]):
            raise BadFormat("format: a token was chosen that doesn't satisfy the grammar")
        assert self._process is not None
        self._allowed = None
        self._process.start({"token": token}, STEP_SECONDS)

    def close(self) -> None:
        """Release the process."""
        if self._process is not None:
            self._grammars.release(self._grammar, self._process)
            self._process = None

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()


def _words(refused: Refused) -> str:
    """Return the first line; the following lines repeat the grammar."""
    line = str(refused).removeprefix("ValueError: ").partition("\n")[0]
    return "no text follows the schema" if line == _NO_TEXT else line


def _bits(mask: str) -> NDArray[np.bool_]:
    packed = np.frombuffer(base64.b64decode(mask), np.uint8)
    return np.unpackbits(packed, bitorder="little").astype(bool)
