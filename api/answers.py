"""Answers of a model: whole, or as text that comes piece by piece."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from moeinf.runtime.generation.generate import FinishReason
from moeinf.runtime.text.reasoning import Kind

Pieces = Generator[tuple[Kind, str], None, "Answer"]


@dataclass(frozen=True)
class Answer:
    """A whole answer.

    finish_reason     stop: the model ended it; length: max_tokens or the context did; interrupted
    tokens            the ids of the answer, with the one that ended it
    prompt_tokens     the length of the prompt, of which computed_tokens had no KV yet
    dropped_messages  the oldest messages that the context had no room for
    stats             times, hit rate and bytes read, with the names of `moeinf run --json`
    """

    text: str
    thinking: str
    finish_reason: FinishReason
    tokens: tuple[int, ...]
    prompt_tokens: int
    computed_tokens: int
    dropped_messages: int
    stats: Mapping[str, Any]

    def __str__(self) -> str:
        return self.text


class Stream(Iterator[str]):
    """The text of an answer, as it comes, without its thinking.

    `close`, or a with statement, ends the answer early.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._answer: Answer | None = None

    def __next__(self) -> str:
        while True:
            try:
                kind, piece = next(self._pieces)
            except StopIteration as end:
                self._answer = end.value or self._answer
                raise StopIteration from None
            if kind == "answer" and piece:
                return piece

    @property
    def answer(self) -> Answer:
        """The whole answer. Raises RuntimeError before the text has ended."""
        if self._answer is None:
            raise RuntimeError("the answer has not ended")
        return self._answer

    def close(self) -> None:
        """End the answer here; the model can begin another."""
        self._pieces.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStream(AsyncIterator[str]):
    """The same for `async for`. The answer is computed by the executor's thread.

    `aclose`, or the end of a cancelled task, ends the answer after its next token.
    """

    def __init__(self, stream: Stream, stopped: threading.Event, executor: Executor) -> None:
        """Take a stream that ends once `stopped` is set."""
        self._stream, self._stopped, self._executor = stream, stopped, executor
        self._come: asyncio.Queue[str | BaseException | None] | None = None  # None: the end

    async def __anext__(self) -> str:
        if self._come is None:
            self._come = asyncio.Queue()
            self._executor.submit(self._drain, self._come, asyncio.get_running_loop())
        try:
            piece = await self._come.get()
        except BaseException:  # the task is cancelled
            self._stopped.set()
            raise
        if isinstance(piece, str):
            return piece
        self._come.put_nowait(None)  # a later call ends, too
        if piece is None:
            raise StopAsyncIteration
        raise piece

    def _drain(
        self, come: asyncio.Queue[str | BaseException | None], loop: asyncio.AbstractEventLoop
    ) -> None:
        """Compute the answer in this thread, and hand its pieces to the loop."""
        last: BaseException | None = None
        try:
            for piece in self._stream:
                loop.call_soon_threadsafe(come.put_nowait, piece)
        except Exception as error:  # raised where the stream is awaited
            last = error
        finally:
            self._stream.close()
        if not loop.is_closed():
            loop.call_soon_threadsafe(come.put_nowait, last)

    @property
    def answer(self) -> Answer:
        """The whole answer. Raises RuntimeError before the text has ended."""
        return self._stream.answer

    def stop(self) -> None:
        """End the answer after its next token."""
        self._stopped.set()

    async def aclose(self) -> None:
        """End the answer here."""
        self.stop()
        if self._come is not None:
            async for _ in self:
                pass

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
