"""Sizes in the forms that users write."""

from __future__ import annotations

import pytest

from moeinf.runtime.sizes import (
    MemorySize,
    format_bytes,
    format_bytes_up,
    parse_memory,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("123", 123),
        ("6MiB", 6 << 20),
        ("4GB", 4_000_000_000),
        ("512M", 512 << 20),
        ("512m", 512 << 20),
        ("1.5 GiB", 3 << 29),
        ("2kb", 2000),
        ("1TiB", 1 << 40),
        ("77B", 77),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1e9", "4 gigabytes", "5iB", "1..5M", "0x10", "1 000"]
)
def test_not_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


def test_shares() -> None:
    assert parse_memory("50%").of(1000) == 500
    assert parse_memory("33.3 %").of(1000) == 333
    assert parse_memory("100%").of(7) == 7
    assert parse_memory("6MiB") == MemorySize(bytes=6 << 20)
    assert parse_memory("6MiB").of(1) == 6 << 20
    with pytest.raises(ValueError, match="at most 100%"):
        parse_memory("101%")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1024, "1.0 KiB"), (9.4 * 2**20, "9.4 MiB"),
     (31 << 30, "31.0 GiB"), (250 << 20, "250 MiB"), (2000 << 40, "2000 TiB")],
)  # fmt: skip
def test_format(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (393216, "384 KiB"),
        (393217, "385 KiB"),
        ((3 << 29) + 1, "1.6 GiB"),
        (5 << 40, "5.0 TiB"),
        (1 << 60, "1048576 TiB"),
    ],
)
def test_a_size_rounded_up_is_enough(count: int, text: str) -> None:
    assert format_bytes_up(count) == text
    assert parse_size(text) >= count
