"""Test the slash commands that change the model, its context, and the kept conversations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from moeinf.cli.chat.backends import Partner
from moeinf.cli.chat.client import Client, ServerError
from moeinf.cli.chat.local import LocalPartner, Opener
from moeinf.cli.chat.remote import RemotePartner
from moeinf.cli.chat.repl import Repl
from moeinf.cli.chat.signals import Leave
from moeinf.cli.chat.slash_commands import SlashCommands
from moeinf.cli.output import Output
from moeinf.errors import MoeinfError
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.generation.saved_chats import BadConversation
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.library import Library, NoSuchModel
from moeinf.runtime.library.processes import Registry
from moeinf.runtime.placement.plan import BadContext
from moeinf.runtime.requests import Limits, SamplingOptions
from tests.server.conftest import serving

GREEDY = SamplingOptions(temperature=0)


def say(partner: Partner, text: str = "17+25=") -> str:
    pieces = partner.say(text, GREEDY, Limits(), lambda: False)
    return "".join(piece for kind, piece in pieces if kind == "answer")


def commands(partner: Any, home: Path) -> SlashCommands:
    return SlashCommands(partner, GREEDY, Limits(), Settings(home), Output())


@pytest.fixture
def partner(demo_home: Path) -> Iterator[LocalPartner]:
    settings = Settings(demo_home)
    opener = Opener(EngineConfig(context=256, trace=False), settings)
    manifest, folder = Library(settings).read("demo")
    with LocalPartner(opener.open(manifest, folder), opener) as partner:
        yield partner
    assert not partner.ready


def test_load_changes_the_model_and_forgets_the_turns(
    partner: LocalPartner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    partner.system, partner.think = "Be kind.", True
    assert say(partner) == "42"
    commands(partner, tmp_path).run("/load demo:f32")
    shown = "demo:f32 · CPU · all experts in RAM · context 256"
    assert capsys.readouterr().out.splitlines() == [shown]
    assert (partner.system, partner.think, partner.messages) == ("Be kind.", None, [])
    assert say(partner) == "42"
    assert str(partner.model) == "demo:f32"


def test_load_of_the_same_model_begins_again(partner: LocalPartner, tmp_path: Path) -> None:
    say(partner)
    engine = partner.engine
    commands(partner, tmp_path).run("/load demo")
    assert partner.engine is engine
    assert partner.messages == []


def test_num_ctx_keeps_the_turns(
    partner: LocalPartner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say(partner)
    line = commands(partner, tmp_path)
    line.run("/set parameter num_ctx 128")
    assert capsys.readouterr().out.startswith("demo:bf16 · CPU · all experts in RAM · context 128")
    assert [message.content for message in partner.messages] == ["17+25=", "42"]
    assert say(partner, "18+25=") == "43"
    line.run("/show parameters")
    assert "num_ctx:" in capsys.readouterr().out
    assert dict(partner.parameters(GREEDY))["num_ctx"] == 128


def test_memory_changes_while_the_model_is_loaded(
    partner: LocalPartner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say(partner)
    engine, line = partner.engine, commands(partner, tmp_path)
    line.run("/set memory 30%")
    assert re.search(r"for experts: \d+ of \d+ in RAM", capsys.readouterr().out)
    assert partner.engine is engine
    assert engine.store.resident <= engine.info.slots < engine.info.experts
    assert say(partner, "18+25=") == "43"
    for wrong in ("", "lots", "1%"):
        with pytest.raises(MoeinfError):
            line.run(f"/set memory {wrong}")
    line.run("/set memory auto")
    assert engine.info.slots == engine.memory.first_slots


def test_a_context_that_is_impossible_changes_nothing(
    partner: LocalPartner, tmp_path: Path
) -> None:
    say(partner)
    line = commands(partner, tmp_path)
    with pytest.raises(BadContext):
        line.run("/set parameter num_ctx 1000000")
    with pytest.raises(InvalidValue, match="num_ctx must be at least 1, got 0"):
        line.run("/set parameter num_ctx 0")
    assert partner.engine.info.context == 256
    assert len(partner.messages) == 2
    assert say(partner, "18+25=") == "43"


def test_a_name_that_nothing_has(partner: LocalPartner, tmp_path: Path) -> None:
    engine, line = partner.engine, commands(partner, tmp_path)
    with pytest.raises(BadConversation, match="no conversation and no model 'demoo'") as caught:
        line.run("/load demoo")
    assert caught.value.hint.startswith("demo:")
    assert caught.value.hint.endswith("/list or /list chats")
    with pytest.raises(NoSuchModel, match="only demo:bf16 and demo:f32"):
        line.run("/load demo:q8")
    assert partner.engine is engine


@pytest.mark.parametrize("error", [MemoryError("no memory"), Leave()], ids=["memory", "leave"])
def test_a_failure_that_leaves_no_model(
    error: BaseException, partner: LocalPartner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old model cannot be loaded again either, or the user wants to leave."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Opener, "open", fail)
    with pytest.raises(type(error)):
        partner.load("demo:f32")
    assert not partner.ready


@pytest.mark.parametrize("error", [MemoryError("no memory"), KeyboardInterrupt()], ids=str)
def test_a_conversation_without_a_model_ends(error: BaseException, tmp_path: Path) -> None:
    def fail(_model: str) -> None:
        raise error

    partner: Any = SimpleNamespace(ready=False, load=fail)
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("/load demo\r")
        repl = Repl(partner, GREEDY, Limits(), Settings(tmp_path), Output(), verbose=False)
        with pytest.raises(type(error)):
            repl.loop()


def test_kept_conversations_are_listed_loaded_and_deleted(
    partner: LocalPartner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = commands(partner, tmp_path)
    say(partner)
    for text in ("/save sums", "/clear", "/save demo", "/load sums"):
        line.run(text)
    assert len(partner.messages) == 2
    (tmp_path / "conversations/torn.json").write_text("{")
    capsys.readouterr()
    line.run("/list chats")
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["NAME", "MODEL", "MESSAGES"],
        ["demo", "demo:bf16", "-"],
        ["sums", "demo:bf16", "2"],
        ["torn", "damaged", "-"],
    ]
    line.run("/load demo")  # a conversation comes before a model of that name
    assert partner.messages == []
    for name in ("demo", "torn", "sums"):
        line.run(f"/delete {name}")
    line.run("/list chats")
    shown = capsys.readouterr().out.splitlines()
    assert shown[-2:] == ["Deleted the conversation 'sums'.", "NAME    MODEL    MESSAGES"]
    with pytest.raises(BadConversation, match="there is no conversation 'sums'"):
        line.run("/delete sums")


def test_wordwrap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = commands(SimpleNamespace(), tmp_path)
    for word, wraps in (("nowordwrap", False), ("wordwrap", True)):
        line.run(f"/set {word}")
        assert line._out.wordwrap is wraps
        assert capsys.readouterr().out == f"Set '{word}' mode.\n"


def test_the_same_with_a_server(
    demo_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(demo_home) as address:
        host, _, port = address.removeprefix("http://").rpartition(":")
        client = Client.of(host, int(port), None, Registry(Settings(demo_home).run))
        about = client.post("/api/show", {"model": "demo:bf16"})
        partner = RemotePartner(lambda: client, about, Settings(demo_home))
        partner.system = "Be kind."
        line = commands(partner, tmp_path)
        assert say(partner) == "42"
        line.run("/load demo:f32")
        assert capsys.readouterr().out == f"demo:f32 · the server at {address}\n"
        assert (partner.system, partner.messages) == ("Be kind.", [])
        assert say(partner) == "42"
        with pytest.raises(BadConversation, match="no conversation and no model 'nothing'"):
            line.run("/load nothing")
        line.run("/set parameter num_ctx 128")
        shown = f"demo:f32 · the server at {address} · context 128\n"
        assert capsys.readouterr().out.startswith(shown)
        assert [message.content for message in partner.messages] == ["17+25=", "42"]
        assert say(partner, "18+25=") == "43"
        with pytest.raises(InvalidValue, match="num_ctx of demo:f32 is at most 512, got 9999"):
            line.run("/set parameter num_ctx 9999")
        (loaded,) = client.ask("GET", "/api/ps", {})["models"][-1:]
        assert (loaded["name"], loaded["context_length"]) == ("demo:f32", 512)
        with pytest.raises(ServerError, match="tokens, the context 128"):
            say(partner, "1+" * 100)


def test_the_context_of_a_server_with_ctx(demo_home: Path, tmp_path: Path) -> None:
    with serving(demo_home, context=256) as address:
        host, _, port = address.removeprefix("http://").rpartition(":")
        client = Client.of(host, int(port), None, Registry(Settings(demo_home).run))
        about = client.post("/api/show", {"model": "demo:f32"})
        partner = RemotePartner(lambda: client, about, Settings(demo_home))
        with pytest.raises(InvalidValue, match="`serve --ctx` bounds num_ctx") as caught:
            commands(partner, tmp_path).run("/set parameter num_ctx 512")
        assert "moeinf run demo:f32 --ctx 512" in caught.value.hint
        commands(partner, tmp_path).run("/set parameter num_ctx 128")
        assert dict(partner.parameters(GREEDY))["num_ctx"] == 128
        assert say(partner) == "42"
