"""JSON that would take much more memory than its text, or time, and numbers that JSON lacks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moeinf.runtime.request_json import MOST_DEPTH, BadJson, parse
from moeinf.server.http.json_text import dump


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "b"]}, [], "", 'a "quoted" [text], {of} \\ marks',
        ["[" * 1000, "]" * 3], list(range(300_000)), "\ud800", [{}] * 8000, ["ab"] * 60_000,
        "x" * 5_000_000, ["\\" * 999] * 9, [[[[[]]]]], -1e300,
    ],
)  # fmt: skip
def test_what_is_sensible_is_read(value: Any) -> None:
    assert parse(json.dumps(value)) == value


@pytest.mark.parametrize(
    "text",
    [
        "", "{", '"', '"\\', "nope", "[1,]", "NaN", "[Infinity]", '{"a": -Infinity}', "1e999",
        "9" * 5000, "[" * 101 + "]" * 101, '{"a":' * 101 + "1" + "}" * 101, "]" * 200 + "[" * 200,
        "[" + "{}," * 20_000 + "{}]", "[" + '"ab",' * 200_000 + "0]", "[" + "0," * 2_000_000 + "0]",
        '"' + '\\"' * 400_000, '"a' * 400_000, '[{"a":"' * 50_000,
    ],
)  # fmt: skip
def test_what_is_too_much_or_no_json_is_refused(text: str) -> None:
    with pytest.raises(BadJson) as refused:
        parse(text)
    assert len(str(refused.value)) < 300


def test_brackets_within_texts_do_not_count() -> None:
    parse(json.dumps({"code": '{"[' * 300_000}))


def test_depth() -> None:
    parse("[" * MOST_DEPTH + "]" * MOST_DEPTH)


def test_numbers_that_json_lacks_are_null() -> None:
    nan, inf = float("nan"), float("inf")
    value = {"a": nan, "b": [inf, -inf, 1.5, ("x", nan)], "c": {"d": nan}}
    assert json.loads(dump(value)) == {
        "a": None,
        "b": [None, None, 1.5, ["x", None]],
        "c": {"d": None},
    }
    assert dump("é\ud800") == '"\\u00e9\\ud800"'
