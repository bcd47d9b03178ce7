"""Test the conversation at a pseudo-terminal."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from tests.cli.conftest import environment
from tests.cli.warm_terminal import spawn

PROMPT = ">>> "
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")


class Terminal:
    """Type lines, and return the program's output up to the next prompt."""

    def __init__(self, home: Path, *arguments: str, model: str = "demo") -> None:
        self.home = home
        variables = {**environment(home), "TERM": "dumb"}
        self.child = spawn(variables, "run", model, *arguments)
        self.child.expect_exact(PROMPT)

    def ask(self, line: str) -> str:
        self.child.send(line + "\r")
        self.child.expect_exact(PROMPT)
        text = _CONTROL.sub("", str(self.child.before))
        # The terminal also echoes a line that arrives before the line editor starts.
        text = text.replace(f"{line}\n{line}\n", f"{line}\n", 1)
        return text.split("\n", 1)[1].strip() if "\n" in text else text

    def leave(self) -> int:
        for _ in range(100):  # the key has an effect only once the line editor runs
            self.child.sendeof()
            if self.child.expect([pexpect.EOF, pexpect.TIMEOUT], timeout=0.2) == 0:
                break
        self.child.close()
        return int(self.child.exitstatus)


@pytest.fixture
def home(tmp_path: Path, demo_home: Path) -> Path:
    (tmp_path / "models").symlink_to(demo_home / "models")
    return tmp_path


@pytest.fixture
def terminal(home: Path) -> Iterator[Terminal]:
    terminal = Terminal(home, "--memory", "30%")
    yield terminal
    terminal.child.close(force=True)


def test_a_conversation(terminal: Terminal, home: Path) -> None:
    assert terminal.ask("17+25=") == "42"
    assert terminal.ask("sort owl, fig, zebra, ant") == "ant, fig, owl, zebra"
    assert "42" not in terminal.ask("hello")
    assert "KV cache:" in terminal.ask("/show cache")
    assert terminal.leave() == 0
    history = home / "history"
    assert "+17+25=" in history.read_text().splitlines()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_later_turns_reuse_the_cache(terminal: Terminal) -> None:
    terminal.ask("/set verbose")
    prompt = "I am Zoe, I live in Oslo and I like figs. Where do I live?"
    first = terminal.ask(prompt)
    assert f"prompt eval count:    {len(prompt) + 3} token(s)" in first
    second = terminal.ask("17+25=")
    # <|end|> of the previous answer, <|user|>, six characters, <|assistant|>
    assert "prompt eval count:    9 token(s)" in second
    assert second.startswith("42")
    assert "load duration:        0.000ms" in second


def test_several_lines(terminal: Terminal, home: Path) -> None:
    terminal.child.send('"""sort owl,\r')
    terminal.child.expect_exact("... ")
    terminal.child.send('fig"""\r')
    terminal.child.expect_exact(PROMPT)
    terminal.ask("/save two-lines")
    saved = json.loads((home / "conversations" / "two-lines.json").read_text())
    assert saved["messages"][0] == {"role": "user", "content": "sort owl,\nfig"}


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(terminal: Terminal) -> None:
    for parameter in ("temperature 80", "top_k 0", "top_p 1", "seed 1"):
        assert "Set parameter" in terminal.ask(f"/set parameter {parameter}")
    terminal.child.send("hi\r")
    terminal.child.expect("hi")
    terminal.child.expect(r"[^\shi\x1b]")  # from the answer: the echo may come twice
    terminal.child.sendintr()
    terminal.child.expect_exact(PROMPT)
    cached = re.search(r"KV cache: +(\d+) of 512", terminal.ask("/show cache"))
    assert cached
    assert 5 <= int(cached[1]) < 500  # without Ctrl-C, the answer fills the context
    terminal.ask("/set parameter temperature 0")
    terminal.ask("/clear")
    assert terminal.ask("17+25=") == "42"
    for _ in range(100):  # between an answer and the line editor, Python may lose the key
        terminal.child.sendintr()
        said = ["Use Ctrl + d or /bye to exit.", pexpect.TIMEOUT]
        if terminal.child.expect_exact(said, timeout=0.5) == 0:
            break
    else:
        pytest.fail("nothing said how to leave")
    assert terminal.leave() == 0


def test_commands(terminal: Terminal, home: Path) -> None:
    assert "/set parameter NAME VALUE" in terminal.ask("/?")
    assert "6 MoE layers, 32 experts each, 4 per token" in terminal.ask("/show info")
    assert "bos_token" in terminal.ask("/show template")
    assert terminal.ask("/show system") == "No system message was set."
    terminal.ask("/set system You are a helpful assistant.")
    assert terminal.ask("/show system") == "You are a helpful assistant."
    assert terminal.ask("17+25=") == "42"
    terminal.ask("/set parameter num_predict 2")
    assert terminal.ask("sort owl, fig, ant").startswith("an\n")
    assert "num_predict:" in terminal.ask("/show parameters")
    assert "demo:bf16" in terminal.ask("/list")
    assert "unknown command '/bogus'" in terminal.ask("/bogus")
    terminal.ask("/set parameter seed 12345678901234567891")
    assert "12345678901234567891" in terminal.ask("/show parameters")
    assert "top_k" in terminal.ask("/set parameter top_k 1e400")
    assert "unknown parameter 'bogus'" in terminal.ask("/set parameter bogus 1")
    assert "temperature must be from 0" in terminal.ask("/set parameter temperature -1")
    assert "is not a name" in terminal.ask("/save ../evil")
    assert "there is no conversation and no model 'nothing'" in terminal.ask("/load nothing")
    assert "Saved" in terminal.ask("/save sums")
    saved = home / "conversations" / "sums.json"
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert [m["content"] for m in json.loads(saved.read_text())["messages"]][:2] == ["17+25=", "42"]
    assert "Cleared" in terminal.ask("/clear")
    assert "4 messages" in terminal.ask("/load sums")
    terminal.child.send("/bye\r")
    terminal.child.expect(pexpect.EOF)


def test_words_that_do_not_fit(terminal: Terminal) -> None:
    """Each shows its usage, and the conversation goes on."""
    usage = "usage: /set parameter|memory|system|verbose|quiet|format|noformat|think|nothink"
    for line in ("/set", "/set bogus", "/set parameters top_k 1"):
        assert usage in terminal.ask(line)
    assert "usage: /set parameter NAME VALUE" in terminal.ask("/set parameter top_k")
    assert "No closing quotation" in terminal.ask('/set parameter stop "a')
    assert "must be an integer" in terminal.ask("/set parameter num_predict many")
    assert "usage: /show info|parameters|system|template|cache" in terminal.ask("/show bogus")
    assert "is not a name" in terminal.ask("/save")
    assert "usage: /load NAME or /load MODEL" in terminal.ask("/load")
    assert "is not a name" in terminal.ask("/delete")
    assert "usage: /list or /list chats" in terminal.ask("/list bogus")
    assert "num_ctx must be at least 1, got 0" in terminal.ask("/set parameter num_ctx 0")
    assert terminal.ask("17+25=") == "42"


def test_stop_parameters(terminal: Terminal) -> None:
    terminal.ask('/set parameter stop ", o" "xyz"')
    assert terminal.ask("sort owl, fig, zebra, ant") == "ant, fig"


def test_nothing_is_kept_after_nohistory(terminal: Terminal, home: Path) -> None:
    terminal.ask("17+25=")
    terminal.ask("/set nohistory")
    assert terminal.ask("18+25=") == "43"
    terminal.ask("/set history")
    terminal.ask("/show system")
    kept = [line[1:] for line in (home / "history").read_text().splitlines() if line[:1] == "+"]
    assert kept == ["17+25=", "/set nohistory", "/show system"]


def test_no_text_is_in_the_prefix_cache_after_nohistory(home: Path) -> None:
    """A long prompt's KV reaches the disk when the terminal is left, unless it is not kept.

    It is not kept with a later turn, either.
    """
    folder, files = home / "state" / "demo" / "bf16" / "prefix", list[int]()
    long = " ".join(f"{number}+{number}=" for number in range(40))
    for lines in (["/set nohistory", long, "/set history", "17+25="], ["/set history", long]):
        one = Terminal(home, "--memory", "30%")
        for line in lines:
            one.ask(line)
        assert one.leave() == 0
        files.append(len(list(folder.glob("*.kv"))))
    assert files[0] == 0 < files[1]


def test_the_line_can_be_edited_and_the_last_one_called_back(terminal: Terminal) -> None:
    assert terminal.ask("17+2x\x7f5=").endswith("42")  # a deleted character
    assert terminal.ask("\x1b[A").endswith("42")  # arrow up
    assert terminal.ask("7+25=\x011").endswith("42")  # Ctrl-A: to the beginning


def test_a_saved_conversation_goes_on_in_another_process(home: Path) -> None:
    first = Terminal(home, "--memory", "30%")
    first.ask("/set system Be kind.")
    first.ask("I am Zoe, I live in Oslo and I like figs. Where do I live?")
    first.ask("/save zoe")
    assert first.leave() == 0
    second = Terminal(home, "--memory", "30%", "--no-prefix-cache")
    try:
        assert "Loaded 'zoe': 2 messages." in second.ask("/load zoe")
        assert second.ask("/show system") == "Be kind."
        second.ask("/set verbose")
        count = re.search(r"prompt eval count: +(\d+) token", second.ask("17+25="))
        assert count
        assert int(count[1]) > 60  # the earlier turns were computed again
    finally:
        second.child.close(force=True)


def test_the_oldest_turns_make_room(home: Path) -> None:
    terminal = Terminal(home, "--ctx", "64", "--memory", "30%")
    try:
        for _ in range(3):
            reply = terminal.ask("I am Zoe, I live in Oslo.")
        assert "the oldest 2 messages were dropped" in reply
        assert "tokens, the context 64" in terminal.ask("x" * 100)
        assert terminal.ask("17+25=").endswith("42")
    finally:
        terminal.child.close(force=True)
