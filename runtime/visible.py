"""Escape control characters of untrusted text, so that printed text cannot steer a terminal."""

from __future__ import annotations

import re

# C0 except newline and tab, DEL, C1; marks that reorder text (Unicode Standard Annex 9).
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""Return `text` with every control character as its escape, for example \x1b or \u202e."""
    return _CONTROL.sub(_escape, text)


def json_visible(document: str) -> str:
    r"""Return an equivalent JSON document with control characters escaped, such as \u001b."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
