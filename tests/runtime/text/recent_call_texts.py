"""Texts with tool calls of MiniMax, Kimi-K2, LFM2 and Hunyuan, and what is to be read in them."""

from __future__ import annotations

from typing import Any

from moeinf.runtime.text.offered_tools import Call
from tests.runtime.text.tool_call_texts import ADD, HUNYUAN, KIMI, LFM2, LFM2_5, MINIMAX, answer

RECENT: list[tuple[str, str, list[Any] | None]] = [
    # MiniMax-M2
    (
        MINIMAX,
        'Add.\n<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">12</parameter>\n'
        '<parameter name="note">12\n</parameter>\n<parameter name="list">["x"]</parameter>\n'
        '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        [answer("Add."), Call("add", {"a": 12, "note": "12\n", "list": ["x"]}), Call("now", {})],
    ),
    (
        MINIMAX,
        '<minimax:tool_call><invoke name="add"><parameter name="note"></minimax:tool_call>'
        "</invoke> b</parameter></invoke></minimax:tool_call>",
        [Call("add", {"note": "</minimax:tool_call></invoke> b"})],
    ),
    (MINIMAX, '<minimax:tool_call><invoke name="rm"></invoke></minimax:tool_call>', None),
    (MINIMAX, '<minimax:tool_call><invoke name="now">x</invoke></minimax:tool_call>', None),
    (MINIMAX, "<minimax:tool_call>x</minimax:tool_call>", None),
    (MINIMAX, '<minimax:tool_call><invoke name="now', None),
    # Kimi-K2
    (
        KIMI,
        "Add.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        '<|tool_call_argument_begin|>{"note": "<|tool_call_end|>"}<|tool_call_end|>'
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [answer("Add."), Call("add", {"note": "<|tool_call_end|>"}), Call("now", {})],
    ),
    (
        KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>add<|tool_call_argument_begin|>"
        '{"a": 1}',  # the answer ends within the section
        [ADD],
    ),
    (
        KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.rm:0<|tool_call_argument_begin|>"
        "{}<|tool_call_end|><|tool_calls_section_end|>",
        None,
    ),
    (KIMI, "<|tool_calls_section_begin|><|tool_calls_section_end|>", None),
    # LFM2
    (
        LFM2,
        "<|tool_call_start|>[add(a=1, b=-2.5, note='it\\'s', list=[\"x\", {'y': None}]), now()]"
        "<|tool_call_end|>Adding.",
        [
            Call("add", {"a": 1, "b": -2.5, "note": "it's", "list": ["x", {"y": None}]}),
            Call("now", {}),
            answer("Adding."),
        ],
    ),
    (
        LFM2_5,
        "<|tool_call_start|>[add(note='<|tool_call_end|>, a=2)', maybe=true)]<|tool_call_end|>",
        [Call("add", {"note": "<|tool_call_end|>, a=2)", "maybe": True})],
    ),
    (
        LFM2_5,  # its template escapes nothing
        "<|tool_call_start|>[add(note='it's \"x\",\nthen \\\n', "
        "list=['a'], maybe=True)]<|tool_call_end|>",
        [Call("add", {"note": 'it\'s "x",\nthen \\\n', "list": ["a"], "maybe": True})],
    ),
    (LFM2_5, "<|tool_call_start|>[add(note='it's)]<|tool_call_end|>", None),
    (LFM2, "<|tool_call_start|>[rm(a=1)]<|tool_call_end|>", None),
    (LFM2, "<|tool_call_start|>[add(1)]<|tool_call_end|>", None),
    (LFM2, "<|tool_call_start|>[add(a=1,)]<|tool_call_end|>", None),
    (LFM2, "<|tool_call_start|>[add(a=1) now()]<|tool_call_end|>", None),
    (LFM2, "<|tool_call_start|>[add(a=open('x'))]<|tool_call_end|>", None),
    (LFM2, f"<|tool_call_start|>[add(list={'[' * 100_000}", None),
    (LFM2, "<|tool_call_start|>[]<|tool_call_end|>", None),
    # Hunyuan-A13B
    (
        HUNYUAN,
        'Add.<tool_calls>[{"name": "add", "arguments": {"a": 1, "note": "</tool_calls>"}}, '
        '{"name": "now", "arguments": {}}]</tool_calls>',
        [answer("Add."), Call("add", {"a": 1, "note": "</tool_calls>"}), Call("now", {})],
    ),
    (
        HUNYUAN,
        '\n<tool_calls>\n[{"name": "add", "arguments": {"a": 1}}]\n</tool_calls>',
        [ADD],
    ),
    (HUNYUAN, '<tool_calls>[{"name": "rm", "arguments": {}}]</tool_calls>', None),
    (HUNYUAN, "<tool_calls>[]</tool_calls>", None),
    (HUNYUAN, '<tool_calls>[{"name": "now"', None),
]
