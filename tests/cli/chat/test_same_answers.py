"""A conversation is answered with the same tokens by `moeinf run` and by `/api/chat`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import DummyInput
from prompt_toolkit.output import DummyOutput

pytest.importorskip("termios", reason="needs pseudo-terminals, which Windows lacks")

from moeinf.cli.chat.local import LocalPartner, Opener
from moeinf.cli.chat.repl import Repl
from moeinf.cli.output import Output
from moeinf.runtime.config import PREFILL_CHUNK, EngineConfig, Settings
from moeinf.runtime.generation.events import Ended
from moeinf.runtime.generation.in_flight import Running
from moeinf.runtime.generation.scheduler import Scheduler
from moeinf.runtime.library.library import Library
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.runtime.sizes import parse_memory
from scripts.make_checkpoint import byte_tokenizer
from tests.cli.chat.test_thinking import make_thinker
from tests.conftest import pull
from tests.server.conftest import serving
from tests.tiny import save_tiny

_TEMPLATE = (  # of letters that the tiny vocabulary has, and short: its context has 128 tokens
    "{% for m in messages %}{{ '>' if m.role == 'user' else '<' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<{% endif %}"
)


@dataclass(frozen=True)
class Turn:
    """One message, and how it is to be answered. interrupted: Ctrl-C after so many tokens."""

    text: str
    options: dict[str, Any] = field(default_factory=dict)
    think: bool | None = None
    interrupted: int | None = None


DEMO = [
    Turn("17+25="),
    Turn("sort owl, fig, zebra, ant", interrupted=5),
    Turn("4091 in words", {"num_predict": 3}),
    Turn("sort owl, fig, ant", {"stop": ["ig"]}),
    Turn("I am Zoe, I live in Oslo and I like figs. Where do I live?" * 4),
    Turn("hello", {"temperature": 1.0, "seed": 5, "num_predict": 20}),
]
TINY = [Turn(f"AND-{number}?", {"num_predict": 5 + number}) for number in range(5)]
TINY += [Turn("NOW?", {"temperature": 1.5, "seed": 3, "num_predict": 12})]
THINKER = [Turn(str(number), think=think) for number, think in enumerate([None, True, False] * 2)]

_GREEDY = {"temperature": 0, "seed": 0}
Answered = list[tuple[list[int], list[int]]]  # token ids of prompts, and of their answers


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Answered:
    """Collect the answers of every scheduler of this process."""
    found: Answered = []
    leave = Scheduler._leave

    def left(self: Scheduler, one: Running, ended: Ended | None) -> None:
        history = one.answer.history
        found.append((history[: one.prompt_tokens], history[one.prompt_tokens :]))
        leave(self, one, ended)

    monkeypatch.setattr(Scheduler, "_leave", left)
    return found


class Typist:
    """Types a conversation at the prompt of `moeinf run`, and Ctrl-C where a turn has one."""

    def __init__(self, turns: list[Turn]) -> None:
        self._lines = self._typed(turns)
        self._turn = turns[0]
        self._passes = 0

    def _typed(self, turns: list[Turn]) -> Iterator[str]:
        for turn in turns:
            settings = {**_GREEDY, "num_predict": -1, "stop": ["''"], **turn.options}
            for name, value in settings.items():
                said = " ".join(value) if isinstance(value, list) else value
                yield f"/set parameter {name} {said}"
            if turn.think is not None:
                yield "/set think" if turn.think else "/set nothink"
            self._turn, self._passes = turn, 0
            yield turn.text

    def line(self) -> str:
        found = next(self._lines, None)
        if found is None:
            raise EOFError
        return found

    def watching(self, begin: Callable[..., None]) -> Callable[..., None]:
        """Return `begin`, which begins a pass, with Ctrl-C in the pass after the last token."""

        def counted(*given: Any) -> None:
            self._passes += 1
            if self._passes - 1 == self._turn.interrupted:
                os.kill(os.getpid(), signal.SIGINT)
            begin(*given)

        return counted


def through_run(
    home: Path, model: str, turns: list[Turn], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Hold the conversation as `moeinf run` does; return the answers."""
    settings, typist = Settings(home), Typist(turns)
    manifest, folder = Library(settings).read(model)
    monkeypatch.setattr(Repl, "_line", lambda _repl, _prompt: typist.line())
    opener = Opener(EngineConfig(memory=parse_memory("100%"), speculation=False), settings)
    with LocalPartner(opener.open(manifest, folder), opener) as partner:
        engine = partner.engine
        engine.store.begin_pass = typist.watching(engine.store.begin_pass)  # type: ignore[method-assign]
        with create_app_session(DummyInput(), DummyOutput()):
            out = Output(quiet=True)
            Repl(partner, SamplingOptions(), Limits(), settings, out, verbose=False).loop()
        return [message.content for message in partner.messages if message.role == "assistant"]


def through_api(home: Path, model: str, turns: list[Turn]) -> list[str]:
    """Hold it as a client of /api/chat does, which sends all turns each time."""
    messages: list[dict[str, str]] = []
    think = None
    with serving(home) as address:
        for turn in turns:
            think = turn.think if turn.think is not None else think
            messages.append({"role": "user", "content": turn.text})
            cut = {} if turn.interrupted is None else {"num_predict": turn.interrupted}
            body = {"model": model, "messages": messages, "think": think, "stream": False}
            options = {**_GREEDY, **cut, **turn.options}
            answer = httpx.post(
                f"{address}/api/chat", json={**body, "options": options}, timeout=60
            )
            answer.raise_for_status()
            messages.append({"role": "assistant", "content": answer.json()["message"]["content"]})
    return [message["content"] for message in messages if message["role"] == "assistant"]


def check(
    home: Path, model: str, turns: list[Turn], answered: Answered, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Check that both faces give the same answers, and return them."""
    said = through_run(home, model, turns, monkeypatch)
    here = list(answered)
    answered.clear()
    assert through_api(home, model, turns) == said
    assert answered == here
    assert len(here) == len(turns) == 6
    return said


@pytest.mark.parametrize("tag", ["bf16", "f32"])
def test_the_demo(
    tag: str, demo_home: Path, answered: Answered, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = check(demo_home, f"demo:{tag}", DEMO, answered, monkeypatch)
    assert (said[0], said[1], said[3]) == ("42", "ant, ", "ant, f")
    assert [len(tokens) for _, tokens in answered[1:3]] == [5, 3]
    for (before, _), (after, _) in pairwise(answered):
        assert after[: len(before)] == before
    assert len(answered[-1][0]) > PREFILL_CHUNK  # a server takes over what it has of that


def test_a_tiny_family(tmp_path: Path, answered: Answered, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("qwen3", tmp_path / "tiny", seed=1)
    byte_tokenizer().save(str(tmp_path / "tiny" / "tokenizer.json"))
    (tmp_path / "tiny" / "chat_template.jinja").write_text(_TEMPLATE)
    pull(tmp_path / "tiny", Settings(tmp_path / "home"), "tiny:f32")
    check(tmp_path / "home", "tiny:f32", TINY, answered, monkeypatch)
    assert len({tuple(tokens) for _, tokens in answered}) > 1


def test_a_model_that_thinks(
    tmp_path: Path, answered: Answered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier turn's thoughts are in no prompt, whichever face has heard them."""
    make_thinker(tmp_path / "checkpoint")
    pull(tmp_path / "checkpoint", Settings(tmp_path / "home"), "thinker:bf16")
    said = check(tmp_path / "home", "thinker:bf16", THINKER, answered, monkeypatch)
    assert said == ["it is 42"] * 6
    assert [len(tokens) for _, tokens in answered] == [7, 7, 3, 3, 7, 3]  # a setting stays
