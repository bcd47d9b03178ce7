"""Test the progress and the result of `moeinf eval`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.chat.test_terminals import in_terminal
from tests.cli.conftest import Command


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("The quick brown fox. 17+25=42\n" * 30)  # more than one window
    return path


def test_the_bar_counts_tokens(demo_home: Path, text: Path, moeinf: Command) -> None:
    """Both windows begin with a token that is not predicted; the bar counts it, too."""
    run = ("eval", "demo", "--file", str(text))
    predicted = json.loads(moeinf(*run, "--json").out)["tokens"]
    code, shown = in_terminal(demo_home, 80, *run, NO_COLOR="1")
    assert code == 0
    assert "evaluating demo" in shown
    counts = [(int(a), int(b)) for a, b in re.findall(r"(\d+)/(\d+)", shown)]
    total = counts[0][1]
    assert total > 512
    assert predicted == total - -(-total // 512)
    assert counts[-1] == (total, total)
    assert re.search(rf"tokens: +{predicted}\r\nperplexity: +[\d.]+\r\n", shown)


@pytest.mark.parametrize("option", ["--quiet", "--json"])
def test_without_a_bar(option: str, demo_home: Path, text: Path) -> None:
    code, shown = in_terminal(demo_home, 80, "eval", "demo", "--file", str(text), option)
    assert (code, "evaluating" in shown) == (0, False)
    assert "tokens" in shown
