"""Parse the tool calls that models write, in the format that their chat template teaches.

<tool_call>{"name": …, "arguments": {…}}</tool_call>          Hermes, Qwen2.5, Qwen3, Granite 4
<tool_call><function=NAME><parameter=P>V</parameter></function></tool_call>
Qwen3-Coder, 3.5, Nemotron-3
<tool_call>NAME<arg_key>P</arg_key><arg_value>V</arg_value></tool_call>                 GLM-4.5
<|tool_call|>[{…}]   and   [TOOL_CALLS][{…}]                           Granite 3.1, Mixtral
<tool_calls>[{…}]</tool_calls>                                              Hunyuan-A13B
[TOOL_CALLS]NAME[ARGS]{…}                                    Mistral Small 4, Ministral 3
<|tool_call>call:NAME{P:V,P:<|"|>TEXT<|"|>}<tool_call|>                            Gemma 4
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>…<｜tool▁sep｜>…<｜tool▁calls▁end｜>         DeepSeek
<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0…                     Kimi-K2
<minimax:tool_call><invoke name="NAME"><parameter name="P">V</parameter>…         MiniMax-M2
<|tool_call_start|>[NAME(P=V)]<|tool_call_end|>                                       LFM2
<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{…}<|tool_call:end|>  Solar-Open
<｜DSML｜function_calls><｜DSML｜invoke name="NAME">…</｜DSML｜invoke>…         DeepSeek-V3.2
<｜DSML｜tool_calls><｜DSML｜invoke name="NAME">…</｜DSML｜invoke>…               DeepSeek-V4
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moeinf.runtime.text.offered_tools import Call, Tool, all_or_none, call_of, checked, offered
from moeinf.runtime.text.reasoning import is_harmony
from moeinf.runtime.text.tool_values import (
    Unfinished,
    json_of_bare_keys,
    load_calls,
    load_json,
    load_value,
)


@dataclass(frozen=True)
class Format:
    """A format of calls. close "": a call ends with the answer.

    read: the text between the marks → calls; [] if it is something else. Raises Unfinished. write:
    a tool's name → the text before and after its arguments in JSON, marks included. It is not valid
    in templates that contain one of the words of `unless`. words: a template of this format has all
    of them; (): it has `open`.
    """

    open: str
    close: str
    read: Callable[[str, Sequence[Tool]], list[Call]]
    write: Callable[[str], tuple[str, str]] | None = None
    unless: tuple[str, ...] = ()
    bare: Format | None = None  # the start of a call without `open`; `close` may follow
    id_length: int = 0  # of the ids that the template requires; 0: any
    words: tuple[str, ...] = ()


def knows_tools(template: str | None) -> bool:
    """Return True if a chat template uses `tools` and teaches a known format."""
    if template is None or not re.search(r"\{[{%][^{}%]*\btools\b", template):
        return False
    return is_harmony(template) or format_of(template) is not None


def format_of(template: str | None) -> Format | None:
    """Return the format of calls in the answer's text, or None.

    Harmony gives None, since its calls have their own channel.
    """
    if template is None or is_harmony(template):
        return None
    return next(
        (
            form
            for form in FORMATS
            if all(word in template for word in form.words or (form.open,))
            and (form.bare is None or form.bare.open in template)
        ),
        None,
    )


def _tagged(body: str, tools: Sequence[Tool]) -> list[Call]:
    """Parse the text between <tool_call> and </tool_call>, in one of three formats."""
    body = body.strip()
    if body.startswith(("{", "[")):
        return _json(body, tools)
    if body.startswith("<function="):
        return _parameters(body, tools)
    return _keys(body, tools)


def _json(body: str, tools: Sequence[Tool]) -> list[Call]:
    found = _loaded(load_json, body)
    return all_or_none(
        [checked(one, tools) for one in (found if isinstance(found, list) else [found])]
    )


def _loaded(load: Callable[[str], Any], text: str) -> Any:
    """Return what `load` makes of a text, or None for an invalid one. Raises Unfinished."""
    try:
        return load(text)
    except Unfinished:
        raise
    except ValueError:
        return None


_DECODER = json.JSONDecoder()
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*)</function>", re.DOTALL)
_NEXT = re.compile(r"(</parameter>|<function=[^<>\n]+>)\s*</function>\s*(?=<function=([^<>\n]+)>)")
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)
_KEY = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL
)


def _parameters(body: str, tools: Sequence[Tool]) -> list[Call]:
    """Parse one or more calls between the same marks. Raises Unfinished."""
    calls: list[Call | None] = []
    for part in _functions(body, tools):
        found = _FUNCTION.fullmatch(part)
        if found is None:
            raise Unfinished("</function> is missing")
        calls += _typed(found[1], found[2], _PARAMETER, tools) or [None]
    return all_or_none(calls)


def _functions(body: str, tools: Sequence[Tool]) -> Iterator[str]:
    """Cut a body where one function ends and another offered one begins."""
    begin = 0
    for found in _NEXT.finditer(body):
        bare = not found[1].startswith("</")  # without parameters the next mark follows at once
        if (found.start() == begin or not bare) and offered(found[2].strip(), tools) is not None:
            yield body[begin : found.end()].rstrip()
            begin = found.end()
    yield body[begin:]


def _bare(body: str, tools: Sequence[Tool]) -> list[Call]:
    """Parse the text between <function= and </function>; a value may contain </function>."""
    if body.count("<parameter=") > body.count("</parameter>"):
        raise Unfinished("</parameter> is missing")
    name, _, rest = body.partition(">")
    return _typed(name, rest, _PARAMETER, tools)


def _keys(body: str, tools: Sequence[Tool]) -> list[Call]:
    if body.count("<arg_value>") > body.count("</arg_value>"):
        raise Unfinished("</arg_value> is missing")
    name, mark, rest = body.partition("<arg_key>")
    return _typed(name, mark + rest, _KEY, tools)


def _typed(name: str, text: str, pair: re.Pattern[str], tools: Sequence[Tool]) -> list[Call]:
    """Read untyped arguments by the types of the tool's schema."""
    return [] if pair.sub("", text).strip() else _of_types(name, pair.findall(text), tools)


def _of_types(name: str, pairs: Sequence[tuple[str, str]], tools: Sequence[Tool]) -> list[Call]:
    tool = offered(name.strip(), tools)
    if tool is None:
        return []
    parameters = tool.get("parameters")
    schemas = parameters.get("properties") if isinstance(parameters, Mapping) else None
    arguments = {}
    for key, value in pairs:
        schema = schemas.get(key.strip()) if isinstance(schemas, Mapping) else None
        arguments[key.strip()] = load_value(value, schema, parameters)
    return [Call(name.strip(), arguments)]


_NAME = re.compile(r"\s*([^\[\]{}\n]+?)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*")
_AGAIN = re.compile(r"\s*(?:\[TOOL_CALLS\](?!\Z)|\Z)")


def _named(body: str, tools: Sequence[Tool]) -> list[Call]:
    """Parse Mistral's newer calls: a name and JSON, each behind a mark of its own."""
    found: list[Call | None] = []
    at = 0
    while at < len(body):
        name = _NAME.match(body, at)
        end = _json_end(body, name.end()) if name is not None else None
        after = _AGAIN.match(body, end) if end is not None else None
        if name is None or after is None:
            return []
        found.append(call_of(name[1], body[name.end() : end], tools))
        at = after.end()
    return all_or_none(found)


def _json_end(text: str, at: int) -> int | None:
    """Return the end of the JSON value at a place, or None if it is invalid."""
    try:
        return _DECODER.raw_decode(text, at)[1]
    except (ValueError, RecursionError):
        return None


_SEP, _CALL_BEGIN, _CALL_END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


def _deepseek(body: str, tools: Sequence[Tool]) -> list[Call]:
    """Parse DeepSeek's calls: type, name and a block of JSON (V3, R1), or name and JSON (V3.1)."""
    found = []
    for part in body.split(_CALL_BEGIN)[1:]:
        before, _, after = part.partition(_CALL_END)[0].partition(_SEP)
        if before.strip() == "function" and "\n" in after:
            before, _, after = after.partition("\n")
            after = after.strip().removeprefix("```json").removesuffix("```")
        found.append(call_of(before.strip(), after, tools))
    return all_or_none(found)


_KIMI_CALL, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_NAME = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?", re.DOTALL)


def _kimi(body: str, tools: Sequence[Tool]) -> list[Call]:
    """Parse Kimi's calls: a name with a number, and JSON."""
    found = []
    for part in body.split(_KIMI_CALL)[1:]:
        before, _, after = part.partition(_KIMI_ARGUMENTS)
        name = _KIMI_NAME.fullmatch(before.strip())
        arguments = after.rpartition(_KIMI_END)[0] if _KIMI_END in after else after
        found.append(None if name is None else call_of(name[1], arguments, tools))
    return all_or_none(found)


_INVOKE, _NAMED = '<invoke name="', '<parameter name="'


def _invoked(body: str, tools: Sequence[Tool]) -> list[Call]:
    """Parse MiniMax's calls: elements with a name. Raises Unfinished."""
    first, *parts = body.split(_INVOKE)
    if first.strip() or not parts:
        return []
    if not parts[-1].rstrip().endswith("</invoke>"):
        raise Unfinished("</invoke> is missing")
    calls: list[Call | None] = []
    for part in parts:
        name, mark, rest = part.rstrip().partition('">')
        if not mark or not rest.endswith("</invoke>"):
            return []
        space, *values = rest.removesuffix("</invoke>").split(_NAMED)
        pairs = [_pair(value.rstrip()) for value in values]
        known = [pair for pair in pairs if pair is not None]
        if space.strip() or len(known) < len(pairs):
            return []
        calls += _of_types(name, known, tools) or [None]
    return all_or_none(calls)


def _pair(text: str) -> tuple[str, str] | None:
    """Return the name and the value of `NAME">VALUE</parameter>`."""
    name, mark, value = text.partition('">')
    if not mark or not value.endswith("</parameter>"):
        return None
    return name, value.removesuffix("</parameter>")


def _python(body: str, tools: Sequence[Tool]) -> list[Call]:
    found = _loaded(load_calls, body) or ()
    return all_or_none([checked({"name": n, "arguments": a}, tools) for n, a in found])


def _bare_keys(body: str, tools: Sequence[Tool]) -> list[Call]:
    """Parse one call of Gemma 4, whose arguments are JSON if it was forced. Raises Unfinished."""
    name, mark, rest = body.strip().removeprefix("call:").partition("{")
    quoted = rest.lstrip().startswith('"')
    arguments = mark + rest if quoted else _loaded(json_of_bare_keys, mark + rest)
    found = _loaded(load_json, arguments or "")
    return all_or_none([checked({"name": name.strip(), "arguments": found}, tools)])


_SOLAR_NAME, _SOLAR_ARGUMENTS = "<|tool_call:name|>", "<|tool_call:args|>"
_SOLAR_ID = "a1b2c3d4e5"  # the example of its template; a client gets an id of ours


def _solar(body: str, tools: Sequence[Tool]) -> list[Call]:
    """Parse one call of Solar-Open: an id, a name, and JSON. Raises Unfinished."""
    name, _, arguments = body.partition(_SOLAR_NAME)[2].partition(_SOLAR_ARGUMENTS)
    found = _loaded(load_json, arguments)
    return all_or_none([checked({"name": name.strip(), "arguments": found}, tools)])


_DSML_INVOKE = re.compile(
    r'\s*<｜DSML｜invoke name="([^"\n]+)">(.*?)</｜DSML｜invoke>(?=\s*(?:<｜DSML｜invoke |\Z))',
    re.DOTALL,
)
_DSML_PARAMETER = re.compile(
    r'\s*<｜DSML｜parameter name="([^"\n]+)" string="(true|false)">(.*?)</｜DSML｜parameter>'
    r"(?=\s*(?:<｜DSML｜parameter |\Z))",
    re.DOTALL,
)


def _dsml(body: str, tools: Sequence[Tool]) -> list[Call]:
    """Parse DeepSeek-V3.2's and V4's calls: a parameter says if it is a string, else it is JSON."""
    if not body.rstrip().endswith("</｜DSML｜invoke>"):
        raise Unfinished("</｜DSML｜invoke> is missing")
    if _DSML_INVOKE.sub("", body).strip():
        return []
    calls: list[Call | None] = []
    for name, text in _DSML_INVOKE.findall(body):
        if _DSML_PARAMETER.sub("", text).strip():
            return []
        found = _DSML_PARAMETER.findall(text)
        arguments = {
            key: value if kind == "true" else load_value(value, None, None)
            for key, kind, value in found
        }
        calls.append(checked({"name": name, "arguments": arguments}, tools))
    return all_or_none(calls)


def _object(name: str) -> tuple[str, str]:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', "}"


def _between(open: str, close: str) -> Callable[[str], tuple[str, str]]:
    def write(name: str) -> tuple[str, str]:
        before, after = _object(name)
        return open + before, after + close

    return write


def _kimi_between(name: str) -> tuple[str, str]:
    before = f"<|tool_calls_section_begin|>{_KIMI_CALL}functions.{name}:0{_KIMI_ARGUMENTS}"
    return before, f"{_KIMI_END}<|tool_calls_section_end|>"


def _gemma_between(name: str) -> tuple[str, str]:
    return f"<|tool_call>call:{name}", "<tool_call|>"


def _named_between(name: str) -> tuple[str, str]:
    return f"[TOOL_CALLS]{name}[ARGS]", ""


def _solar_between(name: str) -> tuple[str, str]:
    before = f"<|tool_call:begin|>{_SOLAR_ID}{_SOLAR_NAME}{name}{_SOLAR_ARGUMENTS}"
    return before, "<|tool_call:end|>"


def _dsml_format(element: str) -> Format:
    """Return a format of DeepSeek, whose templates join its marks from pieces."""
    marks = f"<｜DSML｜{element}>", f"</｜DSML｜{element}>"
    return Format(*marks, _dsml, words=("｜DSML｜", f"{element}>"))


_LFM2 = Format("<|tool_call_start|>", "<|tool_call_end|>", _python)
FORMATS = (
    Format("<tool_call>", "</tool_call>", _tagged, bare=Format("<function=", "</function>", _bare)),
    Format(
        "<tool_call>",
        "</tool_call>",
        _tagged,
        _between("<tool_call>\n", "\n</tool_call>"),
        unless=("<arg_key>",),
    ),
    Format("<minimax:tool_call>", "</minimax:tool_call>", _invoked),
    Format("<|tool_call>", "<tool_call|>", _bare_keys, _gemma_between),
    Format(
        "<|tool_call:begin|>", "<|tool_call:end|>", _solar, _solar_between, id_length=len(_SOLAR_ID)
    ),
    Format("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek),
    Format("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _kimi, _kimi_between),
    _LFM2,
    replace(_LFM2, words=("<|tool_list_start|>",)),  # a template without earlier calls
    _dsml_format("function_calls"),
    _dsml_format("tool_calls"),
    Format("<|tool_call|>", "", _json, _between("<|tool_call|>[", "]")),
    Format("<tool_calls>", "</tool_calls>", _json, _between("<tool_calls>[", "]</tool_calls>")),
    Format(
        "[TOOL_CALLS]",
        "",
        _named,
        _named_between,
        unless=("[CALL_ID]",),
        id_length=9,
        words=("[TOOL_CALLS]", "[ARGS]"),
    ),
    Format("[TOOL_CALLS]", "", _json, _between("[TOOL_CALLS][", "]"), id_length=9),
)
