"""Test a model's reasoning, from the weights to the terminal.

The model is real and small. Attention and experts add nothing, so that the next token depends on
the last token alone, by a chain in the output head. The template selects reasoning or none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken

pytest.importorskip("termios", reason="needs pseudo-terminals, which Windows lacks")

from moeinf.runtime.config import Settings
from scripts.make_checkpoint import byte_tokenizer, config, shapes
from tests.cli.chat.test_repl import Terminal
from tests.cli.conftest import Command, check_document, command_in
from tests.conftest import pull

_WORDS = ("<think>", "</think>", "let me see", "it is ", "42", "\n\n")
_MARKS = ("<|end|>", "<|ask|>", "<|direct|>")
_WIDTH = 320
# The prompt ends with <|ask|>, or with <|direct|> if the template has enable_thinking=False.
_CHAINS = (
    ("<|ask|>", "<think>", "let me see", "</think>", "\n\n", "it is ", "42", "<|end|>"),
    ("<|direct|>", "it is "),
)
_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{{ '<|direct|>' if enable_thinking is defined and not enable_thinking else '<|ask|>' }}"
)


def make_thinker(folder: Path, template: str = _TEMPLATE) -> None:
    """Write a checkpoint of the family olmoe that reasons before it answers 42."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in _WORDS])
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in _MARKS])
    about = config(1, 2, _WIDTH, 64, 1)
    about |= {"vocab_size": _WIDTH, "num_attention_heads": 10, "num_key_value_heads": 10}
    about |= {"eos_token_id": tokenizer.token_to_id("<|end|>")}
    tensors = {
        name: torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
        for name, shape in shapes(about)
    }
    tensors["model.embed_tokens.weight"] = torch.eye(_WIDTH)
    for chain in _CHAINS:
        for last, following in pairwise(map(tokenizer.token_to_id, chain)):
            tensors["lm_head.weight"][following, last] = 1
    folder.mkdir()
    save_file({k: t.bfloat16() for k, t in tensors.items()}, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(about))
    about = {"chat_template": template, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("thinks")
    make_thinker(place / "checkpoint")
    pull(place / "checkpoint", Settings(place / "home"), "thinker:bf16")
    return place / "home"


@pytest.fixture
def moeinf(home: Path) -> Command:
    return command_in(home)


ASK = ("run", "thinker:bf16", "6*7", "--temperature", "0")


def test_thinking_is_on_stderr_and_the_answer_on_stdout(moeinf: Command) -> None:
    result = moeinf(*ASK)
    assert result.out == "it is 42\n"
    assert result.err.startswith("let me see")
    assert "think>" not in result.err


@pytest.mark.parametrize("option", ["--nothink", "--hidethinking", "--quiet"])
def test_options_that_show_the_answer_alone(option: str, moeinf: Command) -> None:
    result = moeinf(*ASK, option)
    assert (result.out, "see" in result.err) == ("it is 42\n", False)


def test_nothink_saves_the_tokens_and_hidethinking_does_not(moeinf: Command) -> None:
    documents = {}
    for option in ("--think", "--nothink", "--hidethinking"):
        documents[option] = json.loads(moeinf(*ASK, option, "--json").out)
        check_document("run", documents[option])
        assert documents[option]["text"] == "it is 42"
    assert documents["--think"]["thinking"] == "let me see"
    assert "thinking" not in documents["--nothink"]
    assert [documents[option]["tokens"] for option in documents] == [7, 3, 7]


def test_nothink_for_templates_that_ask_by_another_name(tmp_path: Path) -> None:
    """The templates of Granite and DeepSeek-V3.1 ask for `thinking`."""
    template = _TEMPLATE.replace("enable_thinking", "thinking")
    make_thinker(tmp_path / "checkpoint", template)
    pull(tmp_path / "checkpoint", Settings(tmp_path / "home"), "thinker:bf16")
    document = json.loads(command_in(tmp_path / "home")(*ASK, "--nothink", "--json").out)
    assert "thinking" not in document
    assert (document["text"], document["tokens"]) == ("it is 42", 3)


def test_raw_tells_nothing_apart(moeinf: Command) -> None:
    """`--raw` shows exactly what the model writes."""
    raw = moeinf("run", "thinker:bf16", "6*7<|ask|>", "--temperature", "0", "--raw")
    assert raw.out == "<think>let me see</think>\n\nit is 42\n"


@pytest.fixture
def terminal(home: Path) -> Iterator[Terminal]:
    terminal = Terminal(home, "--temperature", "0", model="thinker:bf16")
    yield terminal
    terminal.child.close(force=True)


def test_a_conversation_with_one_who_thinks(terminal: Terminal) -> None:
    first = terminal.ask("6*7")
    assert re.fullmatch(r"let me see\s*it is 42", first), first
    assert terminal.ask("/set nothink").endswith("Set 'nothink' mode.")
    assert terminal.ask("again") == "it is 42"
    assert terminal.ask("/set think").endswith("Set 'think' mode.")
    assert "let me see" in terminal.ask("and again")
    terminal.ask("/save thoughts")
    saved = json.loads((Path(terminal.home) / "conversations/thoughts.json").read_text())
    answers = [m["content"] for m in saved["messages"] if m["role"] == "assistant"]
    assert answers == ["it is 42"] * 3  # the saved turns have no reasoning


def test_a_conversation_that_hides_thinking(home: Path) -> None:
    terminal = Terminal(home, "--temperature", "0", "--hidethinking", model="thinker:bf16")
    try:
        assert terminal.ask("6*7") == "it is 42"
    finally:
        terminal.child.close(force=True)
