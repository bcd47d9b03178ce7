"""Parse and format sizes as people write them: 6MiB, 4GB, 512M, 50%."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from moeinf.runtime.invalid import InvalidValue

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)\s*%")
_STEPS = " kmgt"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
Progress = Callable[[str, int, int], None]  # phase, bytes done, total bytes


@dataclass(frozen=True)
class MemorySize:
    """An amount of memory: a number of bytes, or a share of a total that is known later."""

    bytes: int | None = None
    share: float | None = None

    def of(self, whole_bytes: int) -> int:
        """Return the bytes; a share is taken of `whole_bytes`."""
        if self.bytes is not None:
            return self.bytes
        assert self.share is not None
        return round(whole_bytes * self.share)


def parse_size(text: str) -> int:
    """Parse a size into bytes. Raises InvalidValue.

    K, M, G and T are powers of 1024, alone or with `i`, and powers of 1000 with `B`: 1M = 1MiB ≠
    1MB.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise InvalidValue(f"{text!r} is invalid (expected a size such as 6MiB, 4GB or 512M)")
    number, prefix, binary, unit = match.groups()
    if binary and not prefix:
        raise InvalidValue(f"{text!r} is invalid (expected a size such as 6MiB, 4GB or 512M)")
    step = 1000 if unit and not binary else 1024
    return int(float(number) * step ** _STEPS.index(prefix.lower() or " "))


def parse_memory(text: str) -> MemorySize:
    """Parse a size, or a share from 0% to 100%. Raises InvalidValue."""
    match = _SHARE.fullmatch(text.strip())
    if not match:
        return MemorySize(bytes=parse_size(text))
    percent = float(match[1])
    if percent > 100:
        raise InvalidValue(f"{text!r} is invalid (expected at most 100%)")
    return MemorySize(share=percent / 100)


def parse_memory_or_auto(text: str) -> MemorySize | None:
    """Parse like parse_memory; None for `auto`. Raises InvalidValue."""
    return None if text.strip() == "auto" else parse_memory(text)


def format_bytes(count: float) -> str:
    """Format bytes with at most four digits and a binary unit: 512 B, 9.4 MiB, 13.8 GiB."""
    for unit in _UNITS:
        if abs(count) < 1000 or unit == _UNITS[-1]:
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 100 else f"{count:.1f} {unit}"


def format_bytes_up(count: int) -> str:
    """Format bytes as `format_bytes` does, rounded up: the text is never less than `count`."""
    for power, unit in enumerate(_UNITS):
        size = count / 1024**power
        if size < 1000 or unit == _UNITS[-1]:
            break
    if unit == "B" or size >= 100:
        return f"{math.ceil(size)} {unit}"
    return f"{math.ceil(size * 10) / 10:.1f} {unit}"
