"""Texts of models and clients as targets of the fuzzer: answers, Modelfiles, turns, headers."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from moeinf.errors import MoeinfError
from moeinf.runtime.config import ServerSettings, parse_duration
from moeinf.runtime.generation.answer import StopFinder
from moeinf.runtime.generation.strict_turns import strict_turns
from moeinf.runtime.generation.tool_results import results_in_turns
from moeinf.runtime.gguf.base_model import base_names
from moeinf.runtime.library.defaults import Defaults
from moeinf.runtime.library.modelfile import BadModelfile, parse_modelfile, quoted
from moeinf.runtime.names import parse_name
from moeinf.runtime.request_json import BadJson, parse
from moeinf.runtime.sizes import parse_memory
from moeinf.runtime.text.answer_parser import AnswerParser
from moeinf.runtime.text.special_spans import SpecialSpans
from moeinf.server.api.prompts import joined_turns
from moeinf.server.cluster.resumed import Differs, Resumable
from moeinf.server.http.security import Guard
from tests.runtime.text.recent_call_texts import RECENT
from tests.runtime.text.test_tool_calls import TOOLS
from tests.runtime.text.tool_call_texts import CASES, GEMMA, HARMONY, LFM2

_ANSWERS = [(template, text) for template, text, _ in (*CASES, *RECENT) if len(text) < 2000]
_TEMPLATES = list(dict.fromkeys(template for template, _ in _ANSWERS))
_PIECE = 16  # characters, as tokens come
_MORE = (
    (LFM2, '<|tool_call_start|>[add(note="a\')<|tool_call_end|>")]<|tool_call_end|>'),
    (GEMMA, '<|tool_call>call:add{note:<|"|>a<tool_call|><|"|>}<tool_call|>'),
    (HARMONY, "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|>"),
)
_MODELFILE = (
    'FROM demo\nSYSTEM """a\nb"""\nTEMPLATE "{{ messages }}"\nPARAMETER stop "a"\n'
    'PARAMETER temperature 0.5\nMESSAGE user Hi\nMESSAGE assistant """x\n\ny"""\n# c\n'
    'LICENSE "x\n"\n'
)
_CARD = "---\nbase_model:\n  - org/name\nlicense: mit\ntags: [a, b]\n---\n# Name\n"


def _answer(data: bytes, _: Path) -> None:
    """Parse an answer: the template's number, a line end, the text."""
    number, _mark, said = data.partition(b"\n")
    text = said.decode(errors="replace")
    place = int(number) if number.isdigit() and len(number) < 4 else 0
    parser = AnswerParser(_TEMPLATES[place % len(_TEMPLATES)], "", TOOLS)
    for at in range(0, len(text), _PIECE):
        list(parser.add(text[at : at + _PIECE]))
    list(parser.rest())


def _answers() -> list[bytes]:
    seeds = (*_ANSWERS, *_MORE)
    return [f"{_TEMPLATES.index(about)}\n{text}".encode() for about, text in seeds]


def _modelfile(data: bytes, _: Path) -> None:
    text = data.decode(errors="replace")
    found = parse_modelfile(text, "x")
    assert isinstance(found.defaults(), Defaults)


def _quoted(data: bytes, _: Path) -> None:
    """Write a text as a Modelfile's value, as /api/show does."""
    text = data.decode(errors="replace")
    value = quoted(text)
    if value is not None:
        assert parse_modelfile(f"FROM a\nSYSTEM {value}", "x").system == text


def _turns(data: bytes, _: Path) -> None:
    """Join messages: one per line, of the role that its first letter tells."""
    roles = {"u": "user", "s": "system", "t": "tool"}
    lines = data.decode(errors="replace").split("\n")
    said = [{"role": roles.get(line[:1], "assistant"), "content": line} for line in lines]
    strict_turns(joined_turns([{**one} for one in said]))
    strict_turns(said)
    calls = [{"id": str(i), "function": {"name": "f"}} for i in range(len(said))]
    asking = {"role": "assistant", "content": "", "tool_calls": calls}
    results_in_turns([asking, *({**one, "role": "tool", "tool_call_id": "1"} for one in said)])


def _json(data: bytes, _: Path) -> None:
    parse(data.decode(errors="replace"))


def _name(data: bytes, _: Path) -> None:
    parse_name(data.decode(errors="replace"))


def _card(data: bytes, _: Path) -> None:
    list(base_names({}, data.decode(errors="replace")))


def _spans(data: bytes, _: Path) -> None:
    """Find special tokens, and texts that begin like them."""
    list(SpecialSpans(["<|im_start|>", "<|im_end|>", "<s>"]).find(data.decode(errors="replace")))


def _headers(data: bytes, _: Path) -> None:
    """Check a request whose Host and Origin are this text."""

    async def app(*_given: object) -> Any:
        return {"type": "http.disconnect"}

    guard = Guard(app, settings=ServerSettings(), document=lambda _scope, _error: {})
    headers = [(b"host", data), (b"origin", data), (b"authorization", data)]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "path": "/",
        "raw_path": b"/",
        "query_string": b"",
        "headers": headers,
    }
    asyncio.run(guard(scope, app, app))


def _stops(data: bytes, _: Path) -> None:
    """Find stop texts, the first line, in the rest of the text as it arrives."""
    first, _mark, said = data.decode(errors="replace").partition("\n")
    finder = StopFinder([text for text in first[:200].split(",") if text] or ["x"])
    for at in range(0, len(said), _PIECE):
        finder.add(said[at : at + _PIECE])


def _durations(data: bytes, _: Path) -> None:
    text = data.decode(errors="replace")
    for read in (parse_duration, parse_memory):
        with suppress(ValueError):
            read(text)


_BODY = json.dumps({"messages": [{"role": "user", "content": 'a\\"b'}], "x": [1, 2.5e3, None]})


# Arguments of a Target in targets.py: check, allowed errors, seeds.
def _resumed(data: bytes, _: Path) -> None:
    """Continue a stream on another replica; it comes in pieces, twice."""
    stream = Resumable()
    for at in range(0, len(data), _PIECE):
        stream.take(data[at : at + _PIECE])
    stream.restart()
    for at in range(0, len(data), _PIECE):
        stream.take(data[at : at + _PIECE])


TEXT_TARGETS = {
    "resumed": (
        _resumed,
        (Differs,),
        lambda: [b'data: {"response": "ab"}\n\n', b'{"text": "a"}\n'],
    ),
    "answers": (_answer, (), _answers),
    "modelfile": (_modelfile, (BadModelfile,), lambda: [_MODELFILE.encode()]),
    "quoted": (_quoted, (), lambda: [b'a\nb"c""" \n d', b'"a"\n']),
    "turns": (_turns, (), lambda: [b"user a\nuser b\nassistant\nsystem x\ntool y\nuser"]),
    "json": (_json, (BadJson,), lambda: [_BODY.encode()]),
    "names": (_name, (MoeinfError,), lambda: [b"qwen3:30b-a3b-q4", b"hf.co/org/name:Q4_K_M"]),
    "headers": (_headers, (), lambda: [b"localhost:80", b"http://a.example:1", b"[::1]:80"]),
    "stops": (_stops, (), lambda: [b"ab,abab\nxababab", b"<|end|>\n<|en<|end|>"]),
    "durations": (_durations, (), lambda: [b"1h2.5m3s", b"12.5 GiB", b"50 %"]),
    "spans": (_spans, (), lambda: [b"<|im_start|>user<|im_end|><s", b"<|im_<|im_<s><"]),
    "card": (_card, (), lambda: [_CARD.encode()]),
}
