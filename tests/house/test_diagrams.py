"""The diagrams of a request and of an expert name files and states that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"^```mermaid\n(.*?)^```$",
    "".join((ROOT / "docs" / page).read_text() for page in ("architecture.md", "expert.md")),
    re.MULTILINE | re.DOTALL,
)


def test_files_exist() -> None:
    request, expert = BLOCKS
    assert request.startswith("sequenceDiagram")
    named = set(re.findall(r"\b[a-z_]+(?:/[a-z0-9_]+)+\.(?:py|h)\b", request + expert))
    assert len(named) > 10
    assert [file for file in sorted(named) if not (ROOT / file).is_file()] == []


def test_states_are_those_of_the_code() -> None:
    states = set(re.findall(r"^ +(\w+): ", BLOCKS[1], re.MULTILINE))
    moves = re.findall(r"^ +(\w+) --> (\w+): ", BLOCKS[1], re.MULTILINE)
    assert {state for move in moves for state in move} == states
    words = next(ROOT.glob("native/**/adaptive_core.h")).read_text()
    words += next(ROOT.glob("offload/**/residency.py")).read_text()
    held = sorted(states - {"disk", "queued"})
    assert [state for state in held if not re.search(rf"\b{state}\b", words)] == []
