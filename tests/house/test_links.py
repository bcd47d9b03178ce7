"""Every relative link in the documents leads to a file of the repository."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)[^)]*\)")


def test_relative_links() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.md")]
    links = [(path, link) for path in documents for link in LINK.findall(path.read_text("utf-8"))]
    assert len(links) > 20
    broken = [f"{path.name}: {link}" for path, link in links if not (path.parent / link).exists()]
    assert broken == []
