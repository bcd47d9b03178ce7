"""Test the progress and the result of `moeinf eval`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("termios", reason="needs pseudo-terminals, which Windows lacks")

from tests.cli.chat.test_terminals import in_terminal
from tests.cli.conftest import Command, command_in


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


def test_a_tag_of_two_formats_from_pull_to_eval(text: Path, tmp_path: Path) -> None:
    moeinf = command_in(tmp_path / "home")
    for tag in ("bf16", "q4d8"):
        assert moeinf("pull", f"demo:{tag}").code == 0
    assert "q4d8, 5.833 bits per weight in experts\n" in moeinf("show", "demo:q4d8").out
    about = json.loads(moeinf("show", "demo:q4d8", "--json").out)
    assert about["expert_bits_per_weight"] == 5.8333
    assert (about["dtype"], about["forms"]) == ("Q4", [["Q4", "Q8"]])
    assert "demo:q4d8" in moeinf("list").out
    line = ("eval", "demo:q4d8", "--against", "demo:bf16", "--file", str(text), "--json")
    assert 0 < json.loads(moeinf(*line).out)["kl_divergence"] < 0.2
    assert moeinf("verify", "demo:q4d8").code == 0


def test_the_price_of_kv_in_q8(text: Path, moeinf: Command) -> None:
    """By option and by environment, beside the same model with a full cache."""
    run = ("eval", "demo", "--file", str(text))
    found = json.loads(moeinf(*run, "--kv", "q8", "--json").out)
    assert (found["kv"], found["against"], found["lossy"]) == ("q8", "demo", None)
    assert 0 < found["kl_divergence"] < 0.01
    assert found["perplexity"] != found["reference_perplexity"]
    shown = moeinf(*run, MOEINF_KV="q8").out
    assert re.search(r"demo --kv q8 +demo\n", shown)
    assert "KL divergence" in shown
