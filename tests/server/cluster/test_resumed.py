"""Test that a stream goes on where the one before ended."""

from __future__ import annotations

import json

import pytest

from moeinf.server.cluster.resumed import Differs, Resumable, text_of

WORDS = ["The", " quick", "", " brown", " fox", "", ""]


def stream(name: str, words: list[str] = WORDS) -> bytes:
    """Return an event stream whose ids differ by `name`."""
    lines = [
        b"data: " + json.dumps({"id": name, "choices": [{"delta": {"content": word}}]}).encode()
        for word in words
    ]
    return b"\n\n".join([*lines, b"data: [DONE]"]) + b"\n\n"


@pytest.mark.parametrize("cut", range(0, len(stream("a")) + 1, 7))
def test_the_client_gets_every_line_once(cut: int) -> None:
    one, two = stream("a"), stream("b")
    lines = Resumable()
    got = lines.take(one[:cut])
    lines.restart()
    for start in range(0, len(two), 11):
        got += lines.take(two[start : start + 11])
    got += lines.take(b"", last=True)
    assert got.replace(b'"b"', b'"a"') == one


def test_a_stream_may_be_continued_twice() -> None:
    lines = Resumable()
    got = lines.take(stream("a")[:150])
    lines.restart()
    got += lines.take(stream("b")[:60])  # ends before it has caught up
    lines.restart()
    got += lines.take(stream("c"), last=True)
    assert got.replace(b'"c"', b'"a"') == stream("a")


def test_another_text_cannot_be_continued() -> None:
    lines = Resumable()
    lines.take(stream("a")[:200])
    lines.restart()
    with pytest.raises(Differs):
        lines.take(stream("b", ["A", " slow"]))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            b'{"message": {"role": "assistant", "content": "a", "thinking": "b"}, "done": false}',
            "ab",
        ),
        (b'{"response": "a", "done": false}', "a"),
        (b'data: {"choices": [{"text": "a"}]}', "a"),
        (
            b'data: {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "{"}}]}}]}',
            "{",
        ),
        (
            b'data: {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}',
            "a",
        ),
        (b'data: {"type": "content_block_delta", "delta": {"partial_json": "{"}}', "{"),
        (b'data: {"type": "response.output_text.delta", "delta": "a"}', "a"),
        (b"event: message_stop", ""),
        (b"data: [DONE]", ""),
        (b"data: {broken", ""),
        (b"", ""),
    ],
)
def test_text_of(line: bytes, text: str) -> None:
    assert text_of(line) == text


def test_a_line_that_is_nested_without_end_has_no_text() -> None:
    assert text_of(b'data: {"response": ' + b"[" * 100_000) == ""
