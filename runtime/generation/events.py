"""Define a scheduler's requests, and the events that answer them.

It imports nothing heavy: a server reads this before torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from moeinf.errors import forget_frames
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.runtime.sampling.grammar import Constrain

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from moeinf.offload.routing.trace import RequestEam
    from moeinf.runtime.engine.engine import Engine
    from moeinf.runtime.prefix.tree import Match


@dataclass(frozen=True)
class TokenInfo:
    """A chosen token, its log-probability, and the most probable ones: (token, log-probability)."""

    token: int
    logprob: float
    best: list[tuple[int, float]]


@dataclass(frozen=True)
class Piece:
    """Text that has become certain; empty while a character or a stop text is undecided.

    tokens: of the answer so far.
    """

    text: str
    info: TokenInfo | None = None
    tokens: int = field(default=0, compare=False)


CACHED_BLOCK = 64  # tokens


def in_blocks(cached: int) -> int:
    """Return a number of reused tokens in whole blocks, as clients are told it.

    An exact one would tell a client how far its text agrees with another client's, letter by
    letter.
    """
    return cached - cached % CACHED_BLOCK


@dataclass(frozen=True)
class Reading:
    """Progress of a long prompt, before the first piece. Numbers are of its tokens."""

    read: int  # in the KV cache
    tokens: int
    cached: int  # reused from an earlier request
    seconds: float  # since its prefill began


@dataclass(frozen=True)
class Ended:
    """The last event of an answer that was not cut off by an error. Seconds are of this request."""

    reason: Literal["stop", "length", "cancelled"]
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, reused from an earlier request
    token_ids: tuple[int, ...] = ()  # of the answer, including one that ended it
    load_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    request: int = -1  # its number with the engine; -1: it has not begun
    lossy: Mapping[str, float] = field(default_factory=dict)  # see EngineConfig.lossy
    counted: bool = False  # its routing is recorded: all of its prompt was read
    drafted: int = 0  # tokens checked beside the one that was certain
    accepted: int = 0  # of them, those that became tokens of the answer
    stop_text: str = ""  # of the request's limits: the one that ended the answer

    @property
    def tokens(self) -> int:
        """The number of tokens of the answer."""
        return len(self.token_ids)


@dataclass(frozen=True)
class Failed:
    """The last event of an answer that an error has cut off.

    The error has no traceback, whose frames would keep what the engine had.
    """

    error: Exception

    def __post_init__(self) -> None:
        forget_frames(self.error)


@dataclass(frozen=True)
class Vector:
    """The result of an embedding request, before it ends: [D], of length 1."""

    values: NDArray[np.float32]


Event = Piece | Reading | Vector | Ended | Failed


@dataclass
class Times:
    """Moments of a request in seconds of a monotonic clock; None until they come."""

    arrived: float | None = None  # submitted to a loaded engine
    started: float | None = None  # given a place: its prefill begins
    first_token: float | None = None
    last_token: float | None = None
    tokens: int = 0

    def arrive(self) -> None:
        self.arrived = time.perf_counter()

    def start(self) -> None:
        self.started = time.perf_counter()

    def take(self) -> None:
        """Note the time of a chosen token."""
        self.last_token = time.perf_counter()
        self.first_token = self.first_token or self.last_token
        self.tokens += 1

    @property
    def queue_seconds(self) -> float | None:
        """Time from arrival to prefill."""
        return _between(self.arrived, self.started)

    @property
    def first_token_seconds(self) -> float | None:
        """Time from arrival to the first token (TTFT)."""
        return _between(self.arrived, self.first_token)

    @property
    def seconds_per_output_token(self) -> float | None:
        """Mean time of the tokens after the first (TPOT); None without such tokens."""
        spent = _between(self.first_token, self.last_token)
        return None if spent is None or self.tokens < 2 else spent / (self.tokens - 1)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass(eq=False)
class Request:
    """One answer. The scheduler calls all functions here, on its own thread.

    prepare: returns the prompt's token ids.
    emit: takes each event; the last one is Ended or Failed.
    logprobs: how many of the most probable tokens to list beside the chosen one; None: no figures.
    kept: the KV of its text may be kept for later requests.
    embed: the result is the prompt's Vector, without an answer.
    source: the encoder-decoder's input; the prompt is the beginning of its answer.
    stopped: returns True once the answer is to end, at the next layer.
    reading: takes the tokens of the prompt that are read, and all, before each chunk is read.
    routed: takes the routing of the request so far after each window of its prompt, and in the end
    with True; None if it is not recorded.
    stored: takes what the prefix cache holds of the prompt, and the prompt's length in tokens, once
    the KV of the text is kept.
    """

    prepare: Callable[[Engine], list[int]]
    options: SamplingOptions
    limits: Limits
    emit: Callable[[Event], None] = lambda _: None
    logprobs: int | None = None
    constrain: Constrain | None = None
    kept: bool = True
    embed: bool = False
    source: Sequence[int] = ()
    stopped: Callable[[], bool] = lambda: False
    reading: Callable[[int, int], None] = lambda _read, _all: None
    routed: Callable[[RequestEam | None, bool], None] | None = None
    stored: Callable[[Match, int], None] | None = None
    times: Times = field(default_factory=Times)
