"""`moeinf.api.Model`: answers are those of the command line, and one is computed at a time."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moeinf.api import Message, Model
from moeinf.errors import FileError, NotFound
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.generation.seq2seq import BadLanguage
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.library import Library
from moeinf.runtime.sampling.schema_limits import BadFormat

SUM = "17+25="
LONG = {"temperature": 50, "top_k": 0, "top_p": 1, "seed": 7, "max_tokens": 200}


@pytest.fixture(scope="module")
def model(demo_home: Path) -> Iterator[Model]:
    with Model("demo:bf16", home=demo_home, memory="30%", trace=False) as opened:
        yield opened


def test_an_answer(model: Model) -> None:
    answer = model.generate(SUM, temperature=0)
    assert str(answer) == answer.text == "42"
    assert (answer.finish_reason, answer.thinking, answer.dropped_messages) == ("stop", "", 0)
    assert model.engine.tokenizer.decode(list(answer.tokens)).startswith("42")
    assert answer.prompt_tokens >= answer.computed_tokens > 0
    assert 0 < answer.stats["hit_rate"] <= 1


def test_memory_that_is_free(demo_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEINF_MEMORY", "393215")
    with Model("demo:bf16", home=demo_home, memory="auto", trace=False) as opened:
        assert str(opened.generate(SUM, temperature=0)) == "42"


def test_options(model: Model) -> None:
    assert model.generate(SUM, temperature=0, max_tokens=1).finish_reason == "length"
    assert model.generate(SUM, temperature=0, stop="2").text == "4"
    assert model.generate(SUM, temperature=0, stop=("2", "4")).text == ""
    assert json.loads(model.generate(SUM, temperature=0, format="json", max_tokens=80).text) == {}
    raw = model.generate(SUM, raw=True, temperature=0, max_tokens=4)
    assert raw.prompt_tokens < model.generate(SUM, temperature=0, max_tokens=4).prompt_tokens


def test_stream(model: Model) -> None:
    stream = model.stream(SUM, temperature=0)
    with pytest.raises(RuntimeError, match="has not ended"):
        _ = stream.answer
    assert "".join(stream) == stream.answer.text == "42"
    assert list(stream) == []
    assert stream.answer.text == "42"


def test_a_stream_that_is_left(model: Model) -> None:
    with model.stream(SUM, **LONG) as stream:
        next(stream)
        with pytest.raises(RuntimeError, match="close it"):
            model.generate(SUM)
    assert model.generate(SUM, temperature=0).text == "42"
    with pytest.raises(RuntimeError, match="has not ended"):
        _ = stream.answer


def test_chat_reuses_the_turns_before(model: Model) -> None:
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": SUM}]
    first = model.chat(turns, temperature=0)
    said = Message("assistant", first.text)
    later = model.chat([*turns, said, Message("user", "2+2=")], temperature=0)
    assert later.prompt_tokens > first.prompt_tokens
    assert later.computed_tokens < later.prompt_tokens
    assert model.generate(SUM, system="Add.", temperature=0).text == first.text


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "assistant", "content": "42"}],
        [{"role": "user", "content": SUM}, {"role": "system", "content": "Add."}],
        [{"role": "tool", "content": "42"}],
        [{"role": "user"}],
        [{"role": "robot", "content": SUM}],
        [SUM],
    ],
)
def test_messages_that_are_refused(messages: list[Any], model: Model) -> None:
    with pytest.raises(InvalidValue, match="messages: "):
        model.chat(messages)


def test_values_that_are_refused(model: Model, demo_home: Path) -> None:
    with pytest.raises(InvalidValue, match="temperature"):
        model.generate(SUM, temperature=-1)
    with pytest.raises(InvalidValue, match="raw: "):
        model.chat([Message("user", SUM)], raw=True)
    with pytest.raises(
        InvalidValue, match=r"^tempo is not an option \(expected .*, stop, temperature"
    ):
        model.generate(SUM, tempo=1)
    with pytest.raises(TypeError):  # the value's, not the name's
        model.generate(SUM, temperature="0")
    with pytest.raises(InvalidValue, match="max_tokens must be at least 0, got -1"):
        model.generate(SUM, max_tokens=-1)
    with pytest.raises(BadFormat, match="'xml'"):
        model.generate(SUM, format="xml")
    for other in ({"device": "gpu"}, {"kv": "q4"}):
        with pytest.raises(InvalidValue, match=f"--{next(iter(other))}: .* is invalid"):
            Model("demo:bf16", home=demo_home, **other)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="'mru' is not a policy"):
        Model("demo", home=demo_home, policy="mru")
    with pytest.raises(NotFound):
        Model("no-such-model", home=demo_home)
    with pytest.raises(BadLanguage):
        Model("demo:bf16", home=demo_home, languages=("eng_Latn", "fra_Latn"))


def test_threads_wait_for_each_other(model: Model) -> None:
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = model.generate(f"{number}+25=", temperature=0).text

    expected = {n: model.generate(f"{n}+25=", temperature=0).text for n in range(10, 14)}
    threads = [threading.Thread(target=ask, args=(number,)) for number in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == expected


def test_async(model: Model) -> None:
    async def talk() -> None:
        both = await asyncio.gather(
            model.async_generate(SUM, temperature=0),
            model.async_chat([Message("user", "11+25=")], temperature=0),
        )
        assert [answer.text for answer in both] == ["42", "36"]
        stream = model.async_stream(SUM, temperature=0)
        assert "".join([piece async for piece in stream]) == stream.answer.text == "42"
        assert [piece async for piece in stream] == []
        with pytest.raises(InvalidValue):
            await model.async_generate(SUM, temperature=-1)

    asyncio.run(talk())


def test_an_async_stream_that_is_left(model: Model) -> None:
    async def leave() -> None:
        async with model.async_stream(SUM, **LONG) as stream:
            await anext(stream)
        assert (await model.async_generate(SUM, temperature=0)).text == "42"

    asyncio.run(leave())
    assert model.generate(SUM, temperature=0).text == "42"


def test_a_cancelled_task_ends_its_answer(model: Model) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(model.async_generate(SUM, **{**LONG, "max_tokens": None}))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert model.generate(SUM, temperature=0).text == "42"


def test_trace(demo_home: Path, tmp_path: Path) -> None:
    settings = Settings(tmp_path / "home")
    manifest, folder = Library(Settings(demo_home)).read("demo:bf16")
    with Model.of(manifest, folder, EngineConfig(), settings) as model:
        model.generate("reverse: abc", temperature=0, max_tokens=4)
        assert model.conversation.cached_tokens > 0
        done = model.trace(["17+25=", "2+2="], max_tokens=4, out=tmp_path / "two.eam")
        assert (done.requests, done.skipped, done.entries) == (2, 0, 3)
        assert model.conversation.cached_tokens == 0
        assert (tmp_path / "two.eam").stat().st_size > 0


def test_a_trace_that_cannot_be(model: Model) -> None:
    with pytest.raises(FileError, match="nothing can be recorded"):
        model.trace([SUM])


def test_close_ends_a_stream(demo_home: Path) -> None:
    with Model("demo:bf16", home=demo_home, trace=False) as model:
        stream = model.stream(SUM, **LONG)
        next(stream)
    with pytest.raises(RuntimeError, match="demo:bf16 is closed"):
        model.generate(SUM)
    assert list(stream) == []
    with pytest.raises(RuntimeError, match="is closed"):
        model.trace([SUM])
    model.close()  # nothing happens


def test_close_while_another_thread_waits(demo_home: Path) -> None:
    """It ends this thread's stream; the other thread's answer is whole, or an error."""
    model = Model("demo:bf16", home=demo_home, trace=False)
    stream = model.stream(SUM, **LONG)
    next(stream)
    waiting, found = model.stream(SUM, temperature=0), list[str]()

    def ask() -> None:
        try:
            found.append("".join(waiting))
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    while not waiting._pieces.gi_running:
        time.sleep(0.01)
    model.close()
    thread.join(30)
    assert found in (["42"], ["demo:bf16 is closed"])
    with pytest.raises(RuntimeError, match="demo:bf16 is closed"):
        asyncio.run(model.async_generate(SUM))


def test_a_model_that_is_absent_is_pulled(tmp_path: Path) -> None:
    with Model("demo", home=tmp_path) as model:
        assert model.generate(SUM, temperature=0).text == "42"
    assert (tmp_path / "models" / "demo" / "bf16" / "manifest.json").exists()


def test_the_page_of_it_runs(
    demo_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of docs/python.md prints what it says."""
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.setenv("MOEINF_HOME", str(demo_home))
    names: dict[str, object] = {}
    exec(code, names)
    printed = capsys.readouterr().out
    assert printed.startswith("42 0.")
    assert printed.endswith("\n42")
    assert names["turns"] == [
        {"role": "user", "content": SUM},
        {"role": "assistant", "content": "42"},
    ]
