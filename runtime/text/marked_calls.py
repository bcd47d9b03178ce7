"""Parse calls whose arguments stand between marks, in linear time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from moeinf.runtime.text.offered_tools import Call, Offered, all_or_none, checked
from moeinf.runtime.text.tool_values import Unfinished, load_value

PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
KEY, VALUE, VALUE_END = "<arg_key>", "<arg_value>", "</arg_value>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
INVOKE_END, DSML_INVOKE_END = "</invoke>", "</｜DSML｜invoke>"
_KEY_END, _NAMED_END = "</arg_key>", "</parameter>"
_INVOKE, _NAMED = '<invoke name="', '<parameter name="'
_DSML_INVOKE, _DSML_PARAMETER = "<｜DSML｜invoke ", "<｜DSML｜parameter "
_DSML_PARAMETER_END = "</｜DSML｜parameter>"
_SPACE = re.compile(r"\s*+")
_NEXT = re.compile(
    r"(</parameter>|<function=[^<>\n]++>)\s*+</function>\s*+(?=<function=([^<>\n]++)>)"
)
_HEAD = re.compile(r"\s*+<parameter=([^>\n]++)>\n?")
_DSML_HEAD = re.compile(r'\s*+<｜DSML｜invoke name="([^"\n]++)">')
_DSML_NAME = re.compile(r'\s*+<｜DSML｜parameter name="([^"\n]++)" string="(true|false)">')


def parameters(body: str, tools: Offered) -> list[Call]:
    """Parse one or more calls between the same marks. Raises Unfinished."""
    calls: list[Call | None] = []
    for part in _functions(body, tools):
        if not part.endswith(FUNCTION_END):
            raise Unfinished("</function> is missing")
        calls += _function(part[len(FUNCTION) : -len(FUNCTION_END)], tools) or [None]
    return all_or_none(calls)


def _functions(body: str, tools: Offered) -> Iterator[str]:
    """Cut a body where one function ends and another offered one begins."""
    begin = 0
    for found in _NEXT.finditer(body):
        bare = not found[1].startswith("</")  # without parameters the next mark follows at once
        if (found.start() == begin or not bare) and found[2].strip() in tools:
            yield body[begin : found.end()].rstrip()
            begin = found.end()
    yield body[begin:]


def bare(body: str, tools: Offered) -> list[Call]:
    """Parse the text between <function= and </function>; a value may contain </function>."""
    if body.count(PARAMETER) > body.count(PARAMETER_END):
        raise Unfinished("</parameter> is missing")
    return _function(body, tools)


def _function(text: str, tools: Offered) -> list[Call]:
    name, _, rest = text.partition(">")
    found = _elements(rest, _HEAD, PARAMETER_END, PARAMETER)
    if found is None:
        return []
    return _of_types(name, [(head[1], value.removesuffix("\n")) for head, value in found], tools)


def keys(body: str, tools: Offered) -> list[Call]:
    """Parse GLM's call: a name, then keys and values by turns. Raises Unfinished."""
    if body.count(VALUE) > body.count(VALUE_END):
        raise Unfinished("</arg_value> is missing")
    name, mark, rest = body.partition(KEY)
    text, at = mark + rest, 0
    pairs = []
    while (at := skip_space(text, at)) < len(text):
        begin = at + len(KEY)
        middle = _end(text, begin, _KEY_END, VALUE, last=False) if text.startswith(KEY, at) else -1
        value = skip_space(text, middle + len(_KEY_END)) + len(VALUE)
        end = -1 if middle < 0 else _end(text, value, VALUE_END, KEY)
        if end < 0:
            return []
        pairs.append((text[begin:middle], text[value:end]))
        at = end + len(VALUE_END)
    return _of_types(name, pairs, tools)


def invoked(body: str, tools: Offered) -> list[Call]:
    """Parse MiniMax's calls: elements with a name. Raises Unfinished."""
    first, *parts = body.split(_INVOKE)
    if first.strip() or not parts:
        return []
    if not parts[-1].rstrip().endswith(INVOKE_END):
        raise Unfinished("</invoke> is missing")
    calls: list[Call | None] = []
    for part in parts:
        name, mark, rest = part.rstrip().partition('">')
        if not mark or not rest.endswith(INVOKE_END):
            return []
        space, *values = rest.removesuffix(INVOKE_END).split(_NAMED)
        pairs = [_pair(value.rstrip()) for value in values]
        known = [pair for pair in pairs if pair is not None]
        if space.strip() or len(known) < len(pairs):
            return []
        calls += _of_types(name, known, tools) or [None]
    return all_or_none(calls)


def _pair(text: str) -> tuple[str, str] | None:
    """Return the name and the value of `NAME">VALUE</parameter>`."""
    name, mark, value = text.partition('">')
    if not mark or not value.endswith(_NAMED_END):
        return None
    return name, value.removesuffix(_NAMED_END)


def dsml(body: str, tools: Offered) -> list[Call]:
    """Parse DeepSeek-V3.2's and V4's calls: a parameter says if it is a string, else it is JSON."""
    if not body.rstrip().endswith(DSML_INVOKE_END):
        raise Unfinished("</｜DSML｜invoke> is missing")
    calls: list[Call | None] = []
    for head, text in _elements(body, _DSML_HEAD, DSML_INVOKE_END, _DSML_INVOKE) or ():
        found = _elements(text, _DSML_NAME, _DSML_PARAMETER_END, _DSML_PARAMETER)
        if found is None:
            return []
        arguments = {
            name[1]: value if name[2] == "true" else load_value(value, None, None)
            for name, value in found
        }
        calls.append(checked({"name": head[1], "arguments": arguments}, tools))
    return all_or_none(calls)


def _elements(
    text: str, head: re.Pattern[str], close: str, again: str
) -> list[tuple[re.Match[str], str]] | None:
    """Return the heads and the values of elements that fill a text; None for any other text.

    A value ends with the first `close` that the text's end or `again` follows.
    """
    found, at = [], 0
    while skip_space(text, at) < len(text):
        begin = head.match(text, at)
        end = -1 if begin is None else _end(text, begin.end(), close, again)
        if begin is None or end < 0:
            return None
        found.append((begin, text[begin.end() : end]))
        at = end + len(close)
    return found


def _end(text: str, at: int, close: str, again: str, last: bool = True) -> int:
    """Return the place of the first `close` that `again` follows, or if `last` the end; or -1."""
    while (end := text.find(close, at)) >= 0:
        at = end + len(close)
        behind = skip_space(text, at)
        if text.startswith(again, behind) or (last and behind == len(text)):
            break
    return end


def skip_space(text: str, at: int) -> int:
    """Return the place of the first character from `at` on that is not white space."""
    space = _SPACE.match(text, at)
    return at if space is None else space.end()


def _of_types(name: str, pairs: Sequence[tuple[str, str]], tools: Offered) -> list[Call]:
    """Read untyped arguments by the types of the tool's schema."""
    tool = tools.get(name.strip())
    if tool is None:
        return []
    parameters = tool.get("parameters")
    schemas = parameters.get("properties") if isinstance(parameters, Mapping) else None
    arguments = {}
    for key, value in pairs:
        schema = schemas.get(key.strip()) if isinstance(schemas, Mapping) else None
        arguments[key.strip()] = load_value(value, schema, parameters)
    return [Call(name.strip(), arguments)]
