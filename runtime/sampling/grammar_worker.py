"""Match an answer against a grammar, token by token: the child of grammar_processes.py.

The first process reads the vocabulary. Each of its copies compiles one grammar and keeps it, so
that a grammar is compiled once.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from moeinf.runtime.limited_process import serve
from moeinf.runtime.system import resource

_ADDRESS_SPACE_BYTES = 2 << 30  # of the process that reads a vocabulary
_GRAMMAR_BYTES = 128 << 20  # of a copy, in addition to the vocabulary
_ANSWER_CPU_SECONDS = 60  # of one answer, including compilation


class _Matcher:
    """The handler of requests {tokenizer, end}, {grammar} and {token}.

    It answers the last two with the mask of the tokens that may come next: one bit each, in base64.
    """

    def __init__(self) -> None:
        self._tokenizer: LLTokenizer | None = None
        self._source = ""
        self._compiled: LLMatcher | None = None
        self._matcher: LLMatcher | None = None

    def __call__(self, request: dict[str, Any]) -> str:
        if "tokenizer" in request:
            text = Path(request["tokenizer"]).read_text(encoding="utf-8")
            self._tokenizer = LLTokenizer(text, eos_token=request["end"])
            return ""
        if "grammar" in request:
            self._compile(request["grammar"])
        else:
            assert self._matcher is not None
            self._matcher.consume_token(request["token"])
        return self._mask()

    def _compile(self, grammar: str) -> None:
        """Start an answer. Raises ValueError for an invalid grammar."""
        if self._compiled is None or grammar != self._source:
            assert self._tokenizer is not None
            _limit_bytes(_GRAMMAR_BYTES)
            self._compiled, self._source = None, grammar
            limits = LLParserLimits(verbose_errors=False)
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
            _check(matcher)
            self._compiled = matcher
        _limit_processor(_ANSWER_CPU_SECONDS)
        self._matcher = self._compiled.deep_copy()

    def _mask(self) -> str:
        assert self._matcher is not None
        mask = self._matcher.compute_bitmask()
        _check(self._matcher)  # a matcher beyond its limits allows only an end
        return base64.b64encode(mask).decode()


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise ValueError(matcher.get_error())


def _limit_bytes(more: int) -> None:
    """Limit the address space of this process to `more` bytes above its current size."""
    assert resource is not None  # `serve` has limited this process
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    allowed = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (min(allowed, most), most))


def _limit_processor(more: int) -> None:
    """Limit the CPU time of this process to `more` seconds above its current use."""
    assert resource is not None
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + more
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, most))


def main() -> None:
    serve(_Matcher(), _ADDRESS_SPACE_BYTES)


if __name__ == "__main__":
    main()
