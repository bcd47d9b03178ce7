"""Compare published chat templates with transformers' rendering, and read their own calls again.

    python scripts/check_templates.py FOLDER [NAME …]

FOLDER has `*.jinja` files, such as `models/templates` in llama.cpp's sources. Each template renders
several chats here and in transformers: with and without tools, with thinking on, off and unsaid. A
chat that a template refuses must be refused by both. Then each call that the template writes for a
past turn is parsed, at once and character by character, where its format of calls is known.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

sys.path.insert(0, str(Path(__file__).parents[1]))

from moeinf.runtime.text import chat_template
from moeinf.runtime.text.answer_parser import AnswerParser
from moeinf.runtime.text.chat_template import TemplateError, TemplateWorker
from moeinf.runtime.text.offered_tools import Call
from moeinf.runtime.text.reasoning import thinking_variables
from moeinf.runtime.text.tool_calls import knows_tools

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
PROPERTIES = {
    "city": {"type": "string", "description": "Where: <a> & 'b'"},
    "days": {"type": "integer"},
    "units": {"type": "array", "items": {"type": "string"}},
    "more": {"type": "object"},
    "exact": {"type": "boolean"},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Tell the weather.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
        },
    }
    for name in ("get_weather", "get_tides")
]
ARGUMENTS: list[dict[str, Any]] = [
    {"city": "Brno"},
    {"city": 'Zürich "west" <b>\n{2}', "days": 3, "units": ["C", "m/s"], "exact": True},
    {"city": "x", "more": {"a": [1, 2.5], "b": {"c": "d"}}},
]
ASK = {"role": "user", "content": "What is <2 & 'é'> \U0001f642?\n"}
SYSTEM = {"role": "system", "content": "Be kind."}
NEXT = {"role": "user", "content": "And 3?"}
THOUGHT = dict.fromkeys(("thinking", "reasoning_content", "reasoning"), "hm")  # templates' names
THINKS: Sequence[bool | str | None] = (None, True, False, "low")


def calling(*arguments: Mapping[str, Any], content: str | None = "") -> dict[str, Any]:
    """Return an assistant's turn with a call for each of the arguments."""
    calls = [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": tool["function"]["name"], "arguments": dict(given)},
        }
        for number, (given, tool) in enumerate(zip(arguments, TOOLS, strict=False))
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn whose calls have their arguments as JSON text."""
    return {
        **message,
        "tool_calls": [
            {
                **c,
                "function": {
                    **c["function"],
                    "arguments": Call("", c["function"]["arguments"]).text(),
                },
            }
            for c in message["tool_calls"]
        ],
    }


def chats() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield chats by name."""
    told = {"role": "tool", "content": '{"rain": 3}', "tool_call_id": "call00000"}
    again = {**told, "name": "get_tides", "tool_call_id": "call00001"}
    answer = {"role": "assistant", "content": "Four. "}
    thought = {**answer, **THOUGHT}
    yield "one", [ASK]
    yield "system", [SYSTEM, ASK]
    yield "turns", [SYSTEM, ASK, answer, NEXT]
    yield (
        "thought in its turn",
        [ASK, {**answer, "content": "<think>\nhm\n</think>\n\nFour."}, NEXT],
    )
    yield "thought beside its turn", [ASK, thought, NEXT]
    for name, form in (("call", dict), ("call as text", as_text)):
        one = form(calling(ARGUMENTS[1]))
        yield name, [SYSTEM, ASK, one, told]
        yield f"{name}, thought", [ASK, {**one, **THOUGHT}, told]
        yield f"{name}, twice", [ASK, form(calling(*ARGUMENTS[:2])), told, again, answer, NEXT]
        yield f"{name}, null", [ASK, form(calling(ARGUMENTS[0], content=None)), told]


def expected(
    template: str, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> str | None:
    """Return what transformers renders, or None if the template refuses the chat."""
    rest = {key: value for key, value in variables.items() if key != "tools"}
    try:
        found, _ = render_jinja_template(
            conversations=[messages],
            tools=variables.get("tools"),
            chat_template=template,
            **rest,
            **TOKENS,
        )
    except Exception:  # of Jinja, or of the template's operations
        return None
    return str(found[0])


def rendered(
    worker: TemplateWorker, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> str | None:
    """Return what is rendered here, or None if the template refuses the chat."""
    try:
        return worker.render(messages, **variables, **TOKENS)
    except TemplateError:
        return None


def compare(template: str, worker: TemplateWorker) -> tuple[Counter[str], list[str]]:
    """Return how many chats are the same, refused or different, and the names of the last."""
    counts, different = Counter[str](), []
    for name, messages in chats():
        for tools in ([], TOOLS):
            for think in THINKS:
                for prompt in (True, False):
                    variables: dict[str, Any] = {
                        "add_generation_prompt": prompt,
                        **thinking_variables(think),
                        **({"tools": tools} if tools else {}),
                    }
                    ours = rendered(worker, messages, variables)
                    theirs = expected(template, messages, variables)
                    if ours != theirs:
                        different.append(f"{name}, {len(tools)} tools, think {think}, {prompt}")
                    counts["refused" if ours is None else "same"] += ours == theirs
    return counts, different


def lost_calls(template: str, worker: TemplateWorker) -> tuple[int, list[str]]:
    """Return how many turns with calls were read, and what was read in place of the others."""
    read, lost = 0, []
    turns = [(one,) for one in ARGUMENTS] + [tuple(ARGUMENTS[:2])]
    for arguments in turns:
        wanted = [
            Call(tool["function"]["name"], dict(given))
            for tool, given in zip(TOOLS, arguments, strict=False)
        ]
        answers = list(written(template, worker, arguments))
        if not answers:  # several calls in a turn, for one
            continue
        heard = [[calls_in(template, *answer, size) for size in (1, 10**6)] for answer in answers]
        if any(one == [wanted, wanted] for one in heard):
            read += 1
        else:
            lost.append(f"{answers[0][1]!r} is read as {heard[0]}")
    return read, lost


def written(
    template: str, worker: TemplateWorker, arguments: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Yield (prompt, answer): what the template writes for a turn, where it writes the calls."""
    for content in ("", None):
        turn = calling(*arguments, content=content)
        for answer in (turn, as_text(turn)):
            for think in (None, False):
                variables = {"tools": TOOLS, **thinking_variables(think)}
                after = rendered(worker, [ASK, answer], variables)
                for prompt in (True, False):
                    asked = {**variables, "add_generation_prompt": prompt}
                    before = rendered(worker, [ASK], asked)
                    if after is None or before is None or not after.startswith(before):
                        continue
                    text = after.removeprefix(before).removesuffix(TOKENS["eos_token"])
                    names = [tool["function"]["name"] for tool in TOOLS[: len(arguments)]]
                    if all(name in text for name in names):  # gpt-oss writes one call of a turn
                        yield before, text


def calls_in(template: str, before: str, text: str, size: int) -> list[Call]:
    speech = AnswerParser(template, before, TOOLS)
    parts = [part for at in range(0, len(text), size) for part in speech.add(text[at : at + size])]
    return [part for part in [*parts, *speech.rest()] if isinstance(part, Call)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="parts of names of files; default: all files")
    options = parser.parse_args()
    chat_template.RENDER_SECONDS = 60.0  # other work may slow the machine down
    failed = 0
    for path in sorted(options.folder.glob("*.jinja")):
        if options.names and not any(name in path.name for name in options.names):
            continue
        template = path.read_text("utf-8")
        worker, minute = TemplateWorker(template), datetime.now().minute
        try:
            counts, different = compare(template, worker)
            if different and minute != datetime.now().minute and "strftime" in template:
                counts, different = compare(template, worker)  # the time is in the text
            known = knows_tools(template)
            read, lost = lost_calls(template, worker) if known else (0, [])
        finally:
            worker.close()
        calls = f"{read} turns of calls read" if known else "no known format of calls"
        print(f"{path.name}: {counts['same']} texts the same, {counts['refused']} refused, {calls}")
        for problem in [f"differs: {name}" for name in different] + lost:
            print(f"    {problem}", flush=True)
        failed += len(different) + len(lost)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
