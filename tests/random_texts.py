"""Random texts of all scripts, the same for the same seed: what a tokenizer may meet."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator

_RANGES = (
    (0x21, 0x7E), (0xA1, 0x24F), (0x250, 0x2FF), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x52F),
    (0x531, 0x58F), (0x5B0, 0x5F4), (0x600, 0x6FF), (0x900, 0x97F), (0x980, 0x9FE), (0xB80, 0xBFA),
    (0xE01, 0xE5B), (0x1000, 0x109F), (0x10A0, 0x10FF), (0x1100, 0x11FF), (0x1780, 0x17F9),
    (0x1E00, 0x1FFE), (0x2010, 0x2064), (0x2070, 0x20BF), (0x2100, 0x218B), (0x2190, 0x23FF),
    (0x2460, 0x27BF), (0x3001, 0x30FF), (0x3400, 0x34FF), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3),
    (0xFB00, 0xFB4F), (0xFE00, 0xFE4F), (0xFF01, 0xFFEE), (0x10400, 0x1044F), (0x1D400, 0x1D7FF),
    (0x1F300, 0x1F64F), (0x20000, 0x2A6D6),
)  # fmt: skip
_PIECES = (
    "the", "The", "THE", "I'm", "he'S", "we'Ll", "don't", "camelCase", "HTTPServer", "naïve",
    "Straße",
    "日本語", "Русский", "हिन्दी", "ไทย", "한국어", "e\u0301", "👩\u200d👩\u200d👧", "1", "12",
    "1234567", "3.14", "٣٤٥", "½", "Ⅷ", "x²", "==", "!=", "...", "'''", "/*", "*/", "//\n", "#",
    "</s", "<|", "|>", "0x0A", "\u2581",
)  # fmt: skip
_SPACES = (" ", "  ", "     ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "\u00a0", "\u3000")


def random_texts(seed: int, count: int) -> Iterator[str]:
    """Give `count` texts of up to some 60 characters."""
    draw = random.Random(seed)
    scripts = [_assigned(first, last) for first, last in _RANGES]
    for _ in range(count):
        script = draw.choice(scripts)
        parts: list[str] = []
        for _ in range(draw.randint(1, 16)):
            kind = draw.random()
            if kind < 0.4:
                parts.append("".join(draw.choices(script, k=draw.randint(1, 5))))
            elif kind < 0.65:
                parts.append(draw.choice(_PIECES))
            elif kind < 0.9:
                parts.append(draw.choice(_SPACES))
            else:
                parts.append(draw.choice(draw.choice(scripts)))
        yield "".join(parts)


def _assigned(first: int, last: int) -> list[str]:
    """Return the characters that every version of Unicode in use knows."""
    characters = map(chr, range(first, last + 1))
    return [c for c in characters if unicodedata.category(c) not in ("Cn", "Cs", "Co")]
