"""Test `moeinf run --format` without a server: answers follow a schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from moeinf.cli.chat.backends import parse_form
from moeinf.runtime.sampling.schema_limits import BadFormat
from tests.cli.conftest import Command

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}


def test_a_schema_in_a_file(moeinf: Command, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    for words in (("17+25=", "--temperature", "0"), ("hi", "--temperature", "1.5", "--seed", "2")):
        done = moeinf("run", "demo", *words, "--format", str(file), "--json", "--max-tokens", "80")
        document = json.loads(done.out)
        if document["finish_reason"] == "stop":
            Draft202012Validator(SCHEMA).validate(json.loads(document["text"]))
        assert document["text"].startswith("{")
    raw = moeinf("run", "demo", "x", "--raw", "--format", json.dumps(SCHEMA), "--max-tokens", "6")
    assert raw.out.startswith("{")


def test_an_answer_that_is_cut_off_is_told(moeinf: Command) -> None:
    """In a pipe, an incomplete document would look like an answer."""
    line = ("run", "demo", "17+25=", "--format", json.dumps(SCHEMA), "--max-tokens", "3")
    shown = moeinf(*line)
    note = "the answer ends here because of --max-tokens or the context's length"
    assert shown.code == 0
    assert shown.out.startswith("{")
    assert f"{note}: its JSON is incomplete" in shown.err
    document = json.loads(moeinf(*line, "--json").out)
    assert document["finish_reason"] == "length"
    assert f"{note}: its JSON is incomplete" in document["notes"]
    assert note not in moeinf("run", "demo", "17+25=", "--max-tokens", "1").err
    number = json.dumps({"type": "integer", "maximum": 9})
    whole = moeinf("run", "demo", "17+25=", "--format", number, "--max-tokens", "3")
    assert int(whole.out) <= 9
    assert note not in whole.err


def test_what_is_no_schema(moeinf: Command, tmp_path: Path) -> None:
    bad = moeinf("run", "demo", "x", "--format", "{")
    assert (bad.code, bad.out) == (2, "")
    assert "not a JSON schema" in bad.err
    missing = moeinf("run", "demo", "x", "--format", str(tmp_path / "none.json"))
    assert missing.code == 1
    assert "none.json" in missing.err
    wrong = moeinf("run", "demo", "x", "--format", '{"type": "nonsense"}')
    assert wrong.code == 2
    assert "format" in wrong.err


def test_a_schema_that_takes_too_much(moeinf: Command) -> None:
    """The process does not crash, and ends as after any wrong usage."""
    letters = "abcdefghijklmnopqrst"
    endless = {"allOf": [{"type": "string", "pattern": f".*{x}.{{1}}y.*"} for x in letters]}
    done = moeinf("run", "demo", "x", "--format", json.dumps(endless), "--json")
    assert done.code == 2
    assert json.loads(done.out)["error"]["code"] == "bad_format"


def test_a_schema_beyond_the_limits(tmp_path: Path) -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(900)}
    deep = "[" * 100_000 + "]" * 100_000
    for number, text in enumerate(
        (
            json.dumps({"$ref": "#/$defs/d0", "$defs": {**chain, "d900": {}}}),
            f'{{"enum": {deep}}}',
            '{"x": "' + "x" * (3 << 20) + '"}',
        )
    ):
        file = tmp_path / f"{number}.json"
        file.write_text(text)
        with pytest.raises(BadFormat):
            parse_form(str(file))


def test_forms(tmp_path: Path) -> None:
    assert parse_form("json") == "json"
    assert parse_form(' {"type": "object"}') == {"type": "object"}
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(BadFormat, match="an object"):
        parse_form(str(tmp_path / "list.json"))
