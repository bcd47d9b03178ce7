"""Convert untyped arguments of a call to values of the tool's schema.

Some families' chat templates write each value of an earlier call with Python's `str`. Their models
learn that spelling: True, None, ['a'] beside true, null, ["a"].
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NoReturn

_MOST_NODES = 64  # of a parameter's schema; deeper parts are ignored
_NULLS = ("null", "None")
_CALL = re.compile(r"\s*+([A-Za-z_][\w.-]*+)\s*+\(")
_KEY = re.compile(r"\s*+([A-Za-z_]\w*+)\s*+=")
_END, _COMMA, _LAST = re.compile(r"\s*+\)"), re.compile(r"\s*+,"), re.compile(r"\s*+\Z")
_LAST_OF_LIST = re.compile(r"\s*+\]\s*+\Z")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPE = re.compile(
    r"\\(?:([\\'\"nrt])|x([0-9a-f]{2})|u([0-9a-f]{4})|U(000[0-9a-f]{5}|0010[0-9a-f]{4}))"
)
_STRICT = r"'(?:[^'\\\n]|\\.)*+'|\"(?:[^\"\\\n]|\\.)*+\""
# LFM2.5 escapes neither line ends nor quotes in a text. A quote is part of the text unless what
# follows it may follow a value.
_AFTER = r"\s*+(?:[,)\]}:]|\Z)"
_LOOSE = {quote: re.compile(rf"(?:[^{quote}\\]|(?s:\\.)|{quote}(?!{_AFTER}))*+") for quote in "'\""}
_OTHERS = (
    r"(?P<space>\s++)|(?P<mark>[\[\]{},:])|(?P<word>True|False|None|true|false|null)\b"
    r"|(?P<number>-?[0-9]++(?:\.[0-9]++)?+(?:e[+-]?[0-9]++)?+)(?![\w.])"
)
_LITERAL = re.compile(_OTHERS)
_PYTHON = re.compile(f"{_OTHERS}|(?P<text>{_STRICT})")


_QUOTE = '<|"|>'  # Gemma 4's, which is one token; a text between two has no escapes
_BARE = re.compile(
    r"(?P<key>(?<=[{,])\s*+[^\s\[\]{},:<][^\[\]{},:<]*+(?=:))|(?P<space>\s++)"
    r"|(?P<mark>[\[\]{},:])|(?P<word>[\w.+-]++)"
)


class Unfinished(ValueError):
    """A call has no end yet: an end mark was found inside one of its strings."""


def load_json(text: str) -> Any:
    """Parse JSON that can be written again. Raises ValueError for NaN, lone surrogates or depth.

    Raises Unfinished if the text ends inside a string.
    """
    try:
        value = json.loads(text, parse_constant=_no_number)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise Unfinished(error.msg) from error
        raise
    except RecursionError as error:
        raise ValueError("too deep") from error
    return value


def load_value(text: str, schema: Any, parameters: Any) -> Any:
    """Return the value of a text.

    It is the text if the schema allows a string, otherwise JSON, otherwise a Python literal,
    otherwise the text. Null comes before a string if the schema allows both.

    parameters: the whole schema of the tool, to which `$ref` in `schema` refers.
    """
    types = _types(schema, parameters)
    if "null" in types and text.strip() in _NULLS:
        return None
    if "string" in types:
        return text
    with suppress(ValueError):
        return load_json(text)
    with suppress(ValueError):
        return load_json(_json_of_python(text))
    return text


def load_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Parse `[f(a=1, b='x'), g()]`: Python calls with named arguments, which are literals.

    A text may have line ends and quotes that are not escaped. Raises Unfinished if it ends inside a
    string, ValueError for anything else.
    """
    return PythonCalls().add(text)


class PythonCalls:
    """Python calls that may come in several texts; each but the first continues a string."""

    def __init__(self) -> None:
        self._held = ""
        self._calls: list[tuple[str, dict[str, Any]]] = []
        self._name: str | None = None  # of the call whose arguments follow
        self._found: list[str] = []  # the JSON of its arguments
        self._depth, self._key = 0, True
        self._string: list[str] | None = None  # the quote and the pieces of the open string
        self._last: re.Pattern[str] | None = None  # what ends all calls

    def add(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the calls that end here. Raises Unfinished if more must come, ValueError."""
        text, at = self._held + text, 0
        self._held = ""
        if self._last is None:
            text = text.lstrip()
            self._last = _LAST_OF_LIST if text.startswith("[") else _LAST
            at = 1 if text.startswith("[") else 0
        while True:
            if self._name is None:
                at = self._begin(text, at)
            at = self._arguments(text, at)
            if self._last.match(text, at):
                return self._calls
            comma = _COMMA.match(text, at)
            if comma is None:
                raise ValueError("not a list of calls")
            at = comma.end()

    def _begin(self, text: str, at: int) -> int:
        begin = _CALL.match(text, at)
        if begin is None:
            raise ValueError("not a call")
        self._name, self._found = begin[1], ["{"]
        self._depth, self._key = 0, True
        return begin.end()

    def _arguments(self, text: str, at: int) -> int:
        """Convert named arguments to JSON; return the place behind their closing bracket."""
        while at < len(text):
            if self._string is not None or text[at] in "'\"":
                at = self._text(text, at)
                continue
            name = _KEY.match(text, at) if not self._depth and self._key else None
            if name is not None:
                self._found.append(f"{json.dumps(name[1])}:")
                at, self._key = name.end(), False
                continue
            if not self._depth and (end := _END.match(text, at)) is not None:
                self._calls.append((self._name or "", load_json("".join([*self._found, "}"]))))
                self._name = None
                return end.end()
            word, size = _token(text, at, _LITERAL)
            self._depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(word, 0)
            self._key = not self._depth and word == ","
            self._found.append(word)
            at += size
        raise Unfinished("the call has no end")

    def _text(self, text: str, at: int) -> int:
        """Take a string, or the next part of one; return the place behind it. Raises Unfinished.

        A quote at the end of the text ends the string, unless more text follows.
        """
        if self._string is None:
            self._string = [text[at]]
            at += 1
        part = _LOOSE[self._string[0]].match(text, at)
        end = at if part is None else part.end()
        self._string.append(text[at:end])
        if _LAST.match(text, end + 1) or end == len(text) or text[end] == "\\":
            self._held = text[end:]
            raise Unfinished("a string has no end")
        self._found.append(json.dumps(_ESCAPE.sub(_character, "".join(self._string[1:]))))
        self._string, self._key = None, False
        return end + 1


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _types(schema: Any, parameters: Any) -> set[str]:
    """Return the names of the types that a schema allows; an empty set if it names no type."""
    found: set[str] = set()
    nodes, seen = [schema], 0
    while nodes and seen < _MOST_NODES:
        node, seen = nodes.pop(), seen + 1
        if not isinstance(node, Mapping):
            continue
        said = node.get("type")
        found |= {t for t in (said if isinstance(said, list) else [said]) if isinstance(t, str)}
        if node.get("nullable") is True:
            found.add("null")
        values = node["enum"] if isinstance(node.get("enum"), list) else []
        values = [*values[:_MOST_NODES], *([node["const"]] if "const" in node else [])]
        if "type" not in node:
            found |= {"string" for value in values if isinstance(value, str)}
            found |= {"null" for value in values if value is None}
        for key in ("anyOf", "oneOf", "allOf"):
            nodes += node[key][:_MOST_NODES] if isinstance(node.get(key), list) else []
        nodes += _referred(node.get("$ref"), parameters)
    return found


def _referred(reference: Any, parameters: Any) -> Iterator[Any]:
    """Yield the definition that a reference within `parameters` names, if there is one."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return
    node = parameters
    for key in reference[2:].split("/")[:8]:
        name = key.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, Mapping) else None
    yield node


def _json_of_python(text: str) -> str:
    """Return the JSON of a Python literal. Raises ValueError for anything else.

    A string alone is an error, too, because no template puts it in quotes.
    """
    if text.lstrip()[:1] in ("'", '"'):
        raise ValueError("a string")
    found, at = [], 0
    while at < len(text):
        word, size = _token(text, at, _PYTHON)
        found.append(word)
        at += size
    return "".join(found)


def _token(text: str, at: int, literal: re.Pattern[str]) -> tuple[str, int]:
    """Return the JSON of the token of a Python literal at a place, and its length there."""
    token = literal.match(text, at)
    if token is None:
        if text[at] in "'\"":
            raise Unfinished("a string has no end")
        raise ValueError("not a literal")
    kind, word = token.lastgroup, token[0]
    if kind == "word":
        word = _WORDS.get(word, word)
    elif kind == "text":
        word = json.dumps(_ESCAPE.sub(_character, word[1:-1]))
    return word, len(token[0])


def json_of_bare_keys(text: str) -> str:
    """Return the JSON of an object of Gemma 4: {key:1,other:[<|"|>a<|"|>,true]}.

    Raises Unfinished if it ends inside a text, ValueError for anything else.
    """
    return BareKeys().add(text)


class BareKeys:
    """An object of Gemma 4 that may come in several texts; each but the first continues a text."""

    def __init__(self) -> None:
        self._found: list[str] = []
        self._string: list[str] | None = None  # the pieces of the open text

    def add(self, text: str) -> str:
        """Return the JSON that ends here. Raises Unfinished if more must come, ValueError."""
        at = 0
        while at < len(text):
            if self._string is not None:
                end = text.find(_QUOTE, at)
                self._string.append(text[at:] if end < 0 else text[at:end])
                if end < 0:
                    raise Unfinished("a text has no end")
                self._found.append(json.dumps("".join(self._string), ensure_ascii=False))
                self._string, at = None, end + len(_QUOTE)
            elif text.startswith(_QUOTE, at):
                self._string, at = [], at + len(_QUOTE)
            else:
                at = self._token(text, at)
        if self._string is not None:
            raise Unfinished("a text has no end")
        return "".join(self._found)

    def _token(self, text: str, at: int) -> int:
        token = _BARE.match(text, at)
        if token is None:
            raise ValueError("not an object")
        kind, word = token.lastgroup, token[0]
        if kind == "key":
            word = json.dumps(word.strip(), ensure_ascii=False)
        elif kind == "word":
            word = _WORDS.get(word, word)
        self._found.append(word)
        return token.end()


def _character(escape: re.Match[str]) -> str:
    if escape[1]:
        return {"n": "\n", "r": "\r", "t": "\t"}.get(escape[1], escape[1])
    return chr(int(escape[2] or escape[3] or escape[4], 16))
