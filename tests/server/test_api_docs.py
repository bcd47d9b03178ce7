"""Test that docs/api.md matches the server's checks."""

from __future__ import annotations

import re

from scripts.api_docs import PATH, written


def test_the_document_is_up_to_date() -> None:
    text = written()
    assert PATH.read_text() == text, "python scripts/api_docs.py writes it anew"
    for words in ("## POST /api/chat", "## POST /v1/chat/completions", "| `messages` |"):
        assert words in text
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    assert len(headings) == len(set(headings))
    places = {heading.lower().replace(" ", "-") for heading in headings}
    links = set(re.findall(r"\(#([^)]+)\)", text))
    assert "pasttoolcall" in links
    assert links <= places


def test_no_name_is_private() -> None:
    assert "[_" not in written()
