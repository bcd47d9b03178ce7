"""Control characters become visible; other characters stay the same."""

from __future__ import annotations

import json
import sys
import unicodedata

from moeinf.runtime.visible import json_visible, visible

ALL = "".join(map(chr, range(sys.maxunicode + 1)))


def test_no_control_character_is_left() -> None:
    left = {c for c in visible(ALL) if unicodedata.category(c) == "Cc"}
    assert left == {"\n", "\t"}
    orders = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
    assert not {c for c in visible(ALL) if unicodedata.bidirectional(c) in orders}


def test_text_stays() -> None:
    text = "naïve 日本語 🦉 עברית a\tb\n\\x1b [bold]"
    assert visible(text) == text
    assert visible("\x1b[31m\x9b\u202e\r") == r"\x1b[31m\x9b\u202e\x0d"


def test_a_document_means_the_same() -> None:
    value = {"a\x1b": ALL[:0xD800]}
    text = json_visible(json.dumps(value, ensure_ascii=False))
    assert json.loads(text) == value
    assert visible(text) == text
