"""docs/api.md says what the server checks."""

from __future__ import annotations

from scripts.api_docs import PATH, written


def test_the_document_is_up_to_date() -> None:
    text = written()
    assert PATH.read_text() == text, "python scripts/api_docs.py writes it anew"
    for words in ("## POST /api/chat", "## POST /v1/chat/completions", "| `messages` |"):
        assert words in text
