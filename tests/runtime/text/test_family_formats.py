"""Every family: its chat template is rendered as transformers does, its tool calls are parsed."""

from __future__ import annotations

from functools import cache

import pytest

from moeinf.models.families import FAMILIES
from moeinf.runtime.text.offered_tools import Call
from moeinf.runtime.text.tool_calls import knows_tools
from tests.runtime.text.family_formats import FORMATS
from tests.runtime.text.recent_call_texts import RECENT
from tests.runtime.text.test_chat_templates import TEMPLATES, renders_as_transformers
from tests.runtime.text.test_tool_calls import hear
from tests.runtime.text.tool_call_texts import CASES, answer

_rendered = cache(renders_as_transformers)  # families share templates
OTHER_NAMES = {  # of the text part of a model in the table
    "gemma4_text", "glm4v_moe_text", "glm5_next_text", "mistral3", "qwen3_5_moe_text",
    "qwen4_exp_text",
}  # fmt: skip


def test_every_family_has_its_formats() -> None:
    assert FORMATS.keys() == FAMILIES.keys() - OTHER_NAMES
    for formats in FORMATS.values():
        assert bool(formats.template) != bool(formats.no_template)
        assert bool(formats.calls) != bool(formats.no_calls)


@pytest.mark.parametrize("family", [name for name, one in FORMATS.items() if one.template])
def test_template_of(family: str) -> None:
    _rendered(TEMPLATES[FORMATS[family].template])


@pytest.mark.parametrize("family", [name for name, one in FORMATS.items() if one.calls])
def test_tool_calls_of(family: str) -> None:
    """Each text is heard character by character as it is at once, with at least one call."""
    template, found = FORMATS[family].calls, 0
    assert knows_tools(template)
    for form, text, expected in [*CASES, *RECENT]:
        if form != template or len(text) > 10_000:
            continue
        heard = hear(template, text, 1)
        assert heard == ([answer(text)] if expected is None else expected)
        found += sum(isinstance(part, Call) for part in heard)
    assert found > 0
