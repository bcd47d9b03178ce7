"""Hostile grammars fail alone: the cost is limited in time and memory."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.sampling import grammar_processes as module
from moeinf.runtime.sampling.grammar_processes import MOST_IDLE, Grammars, Matching
from moeinf.runtime.sampling.schema_limits import BadFormat

END = 4
LETTERS = "abcdefghijklmnopqrst"
PATTERNS = {"allOf": [{"type": "string", "pattern": f".*{x}.{{1}}y.*"} for x in LETTERS]}


def chain(length: int) -> dict[str, Any]:
    defs = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{length}": {"type": "string"}}}


def names(count: int) -> list[str]:
    return [f"n{i}" for i in range(count)]


HOSTILE = {  # schemas that pass all limits, and schemas that the limits refuse
    "patterns": PATTERNS,
    "chain": chain(3000),
    "required": {"type": "object", "required": names(32_000)},
    "patternProperties": {
        "type": "object",
        "patternProperties": {f"^x{i}_": {"type": "integer"} for i in range(1000)},
    },
    "multipleOf": {"type": "integer", "multipleOf": 1_000_003},
    "allOf": {"allOf": [{"properties": {name: {}}} for name in names(20_000)]},
    "itself": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
}


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    found = Grammars(DEMO_CHECKPOINT / "tokenizer.json", END)
    yield found
    found.close()


def grammar_of(schema: Any) -> str:
    return f"start: %json {json.dumps(schema)}"


def vocabulary_of(grammars: Grammars) -> str:
    assert grammars._vocabulary is not None
    return str(grammars._vocabulary._process.pid)


def processes(grammars: Grammars) -> set[str]:
    """Return the process that holds the vocabulary, and its copies."""
    pid = vocabulary_of(grammars)
    return {pid, *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_costs_its_own_answer(
    name: str, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMPILE_SECONDS", 2.0)
    good = grammar_of({"type": "integer"})
    with closing(Matching(grammars, good)) as before:
        allowed = before.allowed()
        start = time.monotonic()
        with (
            closing(Matching(grammars, grammar_of(HOSTILE[name]))) as hostile,
            pytest.raises(BadFormat, match=r"^format: [^\n]+$"),
        ):
            hostile.allowed()
        assert time.monotonic() - start < 10
        before.took(int(np.flatnonzero(allowed)[-1]))  # an answer that had started continues
        assert before.allowed().any()
    with closing(Matching(grammars, good)) as after:
        assert (after.allowed() == allowed).all()


def test_nothing_blocks_while_a_grammar_is_compiled(grammars: Grammars) -> None:
    with closing(Matching(grammars, grammar_of({"type": "integer"}))) as warm:
        warm.allowed()
    with closing(Matching(grammars, grammar_of(PATTERNS))) as hostile:
        steps, start = [time.monotonic()], time.monotonic()

        def wait() -> None:
            while not hostile.ready(0.01):
                steps.append(time.monotonic())

        with pytest.raises(BadFormat, match="too much time or memory"):
            wait()
        assert time.monotonic() - start < module.COMPILE_SECONDS + 3
        assert max(np.diff(steps), default=0) < 1.0


@pytest.mark.linux("reads /proc")
def test_a_grammar_is_compiled_once_and_few_are_kept(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    copy = module.LimitedProcess.copy

    def counted(self: module.LimitedProcess) -> module.Channel:
        asked.append("copy")
        return copy(self)

    monkeypatch.setattr(module.LimitedProcess, "copy", counted)
    for number in (*range(MOST_IDLE + 2), MOST_IDLE + 1, 0):
        with closing(Matching(grammars, grammar_of({"const": number}))) as one:
            assert one.allowed().any()
    assert len(asked) == MOST_IDLE + 3  # the last but one was kept, the first was not
    until = time.monotonic() + 5
    while len(living := processes(grammars)) > 1 + MOST_IDLE and time.monotonic() < until:
        time.sleep(0.02)
    assert len(living) == 1 + MOST_IDLE
    grammars.close()
    while any(Path(f"/proc/{pid}").exists() for pid in living) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(Path(f"/proc/{pid}").exists() for pid in living)


def test_a_process_that_is_killed_is_replaced(grammars: Grammars) -> None:
    with closing(Matching(grammars, grammar_of({"type": "integer"}))) as one:
        one.allowed()
        assert grammars._vocabulary is not None
        os.kill(grammars._vocabulary._process.pid, 9)
        grammars._vocabulary._process.wait()
        assert one.allowed().any()  # a copy is independent
    with closing(Matching(grammars, grammar_of({"type": "string"}))) as found:
        assert found.allowed().any()


def test_a_token_that_is_not_allowed_is_refused(grammars: Grammars) -> None:
    with closing(Matching(grammars, grammar_of({"type": "integer"}))) as one:
        refused = int(np.flatnonzero(~one.allowed())[-1])
        for token in (refused, 1 << 30):
            with pytest.raises(BadFormat, match="doesn't satisfy"):
                one.took(token)


@pytest.mark.linux("reads /proc")
@pytest.mark.parametrize("later", ["at once", "after its time", "when its process has died"])
def test_an_answer_left_unread_does_not_reach_the_next_one(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    monkeypatch.setattr(module, "STEP_SECONDS", 0.2)
    grammar = grammar_of({"enum": ["a", "b"]})
    first = Matching(grammars, grammar)
    begins = first.allowed()
    kept = first._process
    first.took(int(np.flatnonzero(begins)[0]))
    first.close()
    if later != "at once":
        time.sleep(0.3)
    if later == "when its process has died":
        (copy,) = processes(grammars) - {vocabulary_of(grammars)}
        os.kill(int(copy), 9)
        while Path(f"/proc/{copy}").exists():
            time.sleep(0.01)
    with closing(Matching(grammars, grammar)) as second:
        assert (second.allowed() == begins).all()
        assert later == "at once" or (second._process is kept) == (later == "after its time")


def test_a_tokenizer_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with (
        closing(Grammars(tmp_path / "tokenizer.json", END)) as broken,
        closing(Matching(broken, grammar_of({}))) as one,
        pytest.raises(BadFormat, match=r"^format: "),
    ):
        one.allowed()


@pytest.mark.linux("reads /proc")
def test_matching_does_not_start_threads(grammars: Grammars) -> None:
    """A process with several threads must not fork."""
    before = threading.active_count()
    with closing(Matching(grammars, grammar_of({}))) as one:
        one.allowed()
        assert grammars._vocabulary is not None
        pid = grammars._vocabulary._process.pid
        assert "Threads:\t1\n" in Path(f"/proc/{pid}/status").read_text()
    assert threading.active_count() == before
