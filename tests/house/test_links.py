"""Test that each relative link of the documents leads to a file here, and to a heading there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("*.md", "docs/**/*.md", "tests/**/*.md", ".github/**/*.md")
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?[^)]*\)")
BLOCK = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[tuple[str, str]]:
    """Return place and anchor of each relative link that a page shows; either may be empty."""
    return LINK.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    seen: Counter[str] = Counter()
    found = set()
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def broken(page: Path) -> list[str]:
    """Return the links of a page that lead to no file, or to no heading of it."""
    faults = []
    for place, anchor in links(page):
        there = page.parent / place if place else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            faults.append(f"{page.name}: {place}{'#' * bool(anchor)}{anchor}")
    return faults


def test_relative_links() -> None:
    pages = [page for pattern in PAGES for page in ROOT.glob(pattern)]
    found = [link for page in pages for link in links(page)]
    assert len(found) > 200
    assert sum(bool(anchor) for _, anchor in found) > 20
    assert [fault for page in pages for fault in broken(page)] == []


def test_links_without_an_end(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Other\n## It's `this`: now\n## Twice\n## Twice\n")
    page = tmp_path / "page.md"
    good = ["other.md", "#a-title", "other.md#its-this-now", "other.md#twice-1", "https://x.org#y"]
    bad = ["none.md", "#a-comment", "other.md#twice-2", "#other"]
    code = "```sh\n# A comment\n[x](in-code.md)\n```\n"
    page.write_text(f"# A title\n{code}" + "".join(f"[x]({link}) " for link in good + bad))
    assert broken(page) == [f"page.md: {link}" for link in bad]
