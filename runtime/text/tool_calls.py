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
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from moeinf.runtime.text.call_ends import Begun, Closed, Converted, Ends, JsonText, Paired
from moeinf.runtime.text.marked_calls import (
    DSML_INVOKE_END,
    FUNCTION,
    FUNCTION_END,
    INVOKE_END,
    PARAMETER,
    PARAMETER_END,
    VALUE,
    VALUE_END,
    bare,
    dsml,
    invoked,
    keys,
    parameters,
)
from moeinf.runtime.text.offered_tools import Call, Offered, all_or_none, call_of, checked
from moeinf.runtime.text.reasoning import is_harmony
from moeinf.runtime.text.tool_values import (
    BareKeys,
    PythonCalls,
    Unfinished,
    json_of_bare_keys,
    load_calls,
    load_json,
)


@dataclass(frozen=True)
class Format:
    """A format of calls. close "": a call ends with the answer.

    read: the text between the marks → calls; [] if it is something else. Raises Unfinished. ends:
    that text → what decides at later end marks; it takes the text from its first character. write:
    a tool's name → the text before and after its arguments in JSON, marks included. It is not valid
    in templates that contain one of the words of `unless`. words: a template of this format has all
    of them; (): it has `open`.
    """

    open: str
    close: str
    read: Callable[[str, Offered], list[Call]]
    write: Callable[[str], tuple[str, str]] | None = None
    unless: tuple[str, ...] = ()
    bare: Format | None = None  # the start of a call without `open`; `close` may follow
    id_length: int = 0  # of the ids that the template requires; 0: any
    words: tuple[str, ...] = ()
    ends: Callable[[str], Ends] | None = None


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


def _tagged(body: str, tools: Offered) -> list[Call]:
    """Parse the text between <tool_call> and </tool_call>, in one of three formats."""
    body = body.strip()
    if body.startswith(("{", "[")):
        return _json(body, tools)
    if body.startswith(FUNCTION):
        return parameters(body, tools)
    return keys(body, tools)


def _tagged_ends(body: str) -> Ends:
    body = body.lstrip()
    if body.startswith(("{", "[")):
        return JsonText()
    return Closed(FUNCTION_END) if body.startswith(FUNCTION) else Paired(VALUE, VALUE_END)


def _json(body: str, tools: Offered) -> list[Call]:
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


_ARGS = re.compile(r"(?:\[CALL_ID\]\w++)?+\[ARGS\]\s*+")
_AGAIN = re.compile(r"\s*+(?:\[TOOL_CALLS\](?!\Z)|\Z)")


def _named(body: str, tools: Offered) -> list[Call]:
    """Parse Mistral's newer calls: a name and JSON, each behind a mark of its own."""
    found: list[Call | None] = []
    at = 0
    while at < len(body):
        mark = body.find("[", at)
        name = body[at : max(at, mark)].lstrip()
        begin = _ARGS.match(body, mark) if name and not set("]{}\n") & set(name) else None
        end = _json_end(body, begin.end()) if begin is not None else None
        after = _AGAIN.match(body, end) if end is not None else None
        if begin is None or after is None:
            return []
        found.append(call_of(name, body[begin.end() : end], tools))
        at = after.end()
    return all_or_none(found)


def _json_end(text: str, at: int) -> int | None:
    """Return the end of the JSON value at a place, or None if it is invalid."""
    try:
        return _DECODER.raw_decode(text, at)[1]
    except (ValueError, RecursionError):
        return None


_SEP, _CALL_BEGIN, _CALL_END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


def _deepseek(body: str, tools: Offered) -> list[Call]:
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


def _kimi(body: str, tools: Offered) -> list[Call]:
    """Parse Kimi's calls: a name with a number, and JSON."""
    found = []
    for part in body.split(_KIMI_CALL)[1:]:
        before, _, after = part.partition(_KIMI_ARGUMENTS)
        name = before.strip().removeprefix("functions.")
        first, _, number = name.rpartition(":")
        arguments = after.rpartition(_KIMI_END)[0] if _KIMI_END in after else after
        counted = bool(first) and number.isascii() and number.isdecimal()
        found.append(call_of(first if counted else name, arguments, tools))
    return all_or_none(found)


def _python(body: str, tools: Offered) -> list[Call]:
    found = _loaded(load_calls, body) or ()
    return all_or_none([checked({"name": n, "arguments": a}, tools) for n, a in found])


def _bare_keys(body: str, tools: Offered) -> list[Call]:
    """Parse one call of Gemma 4, whose arguments are JSON if it was forced. Raises Unfinished."""
    name, mark, rest = body.strip().removeprefix("call:").partition("{")
    quoted = rest.lstrip().startswith('"')
    arguments = mark + rest if quoted else _loaded(json_of_bare_keys, mark + rest)
    found = _loaded(load_json, arguments or "")
    return all_or_none([checked({"name": name.strip(), "arguments": found}, tools)])


_SOLAR_NAME, _SOLAR_ARGUMENTS = "<|tool_call:name|>", "<|tool_call:args|>"
_SOLAR_ID = "a1b2c3d4e5"  # the example of its template; a client gets an id of ours


def _bare_keys_ends(body: str) -> Ends:
    begin = body.partition("{")[2].lstrip()
    return Begun(JsonText() if begin.startswith('"') else Converted(BareKeys()), "{")


def _solar(body: str, tools: Offered) -> list[Call]:
    """Parse one call of Solar-Open: an id, a name, and JSON. Raises Unfinished."""
    name, _, arguments = body.partition(_SOLAR_NAME)[2].partition(_SOLAR_ARGUMENTS)
    found = _loaded(load_json, arguments)
    return all_or_none([checked({"name": name.strip(), "arguments": found}, tools)])


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
    words = ("｜DSML｜", f"{element}>")
    return Format(*marks, dsml, words=words, ends=lambda _: Closed(DSML_INVOKE_END))


_TAGGED = Format("<tool_call>", "</tool_call>", _tagged, ends=_tagged_ends)
_BARE = Format(FUNCTION, FUNCTION_END, bare, ends=lambda _: Paired(PARAMETER, PARAMETER_END))
_LFM2 = Format(
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    _python,
    ends=lambda _: Converted(PythonCalls()),
)
FORMATS = (
    replace(_TAGGED, bare=_BARE),
    replace(_TAGGED, write=_between("<tool_call>\n", "\n</tool_call>"), unless=("<arg_key>",)),
    Format(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        invoked,
        ends=lambda _: Closed(INVOKE_END),
    ),
    Format("<|tool_call>", "<tool_call|>", _bare_keys, _gemma_between, ends=_bare_keys_ends),
    Format(
        "<|tool_call:begin|>",
        "<|tool_call:end|>",
        _solar,
        _solar_between,
        id_length=len(_SOLAR_ID),
        ends=lambda _: Begun(JsonText(), _SOLAR_ARGUMENTS, keep=False),
    ),
    Format("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek),
    Format("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _kimi, _kimi_between),
    _LFM2,
    replace(_LFM2, words=("<|tool_list_start|>",)),  # a template without earlier calls
    _dsml_format("function_calls"),
    _dsml_format("tool_calls"),
    Format("<|tool_call|>", "", _json, _between("<|tool_call|>[", "]")),
    Format(
        "<tool_calls>",
        "</tool_calls>",
        _json,
        _between("<tool_calls>[", "]</tool_calls>"),
        ends=lambda _: JsonText(),
    ),
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
