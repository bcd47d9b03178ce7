"""Headers of GGUF files: what is read, and what is refused before anything is allocated."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint
from moeinf.runtime.gguf.header import Header, parse_header
from moeinf.runtime.gguf.reader import parts_of, read_gguf, stem_of

U32, F32, BOOL, STRING, ARRAY, U64, U8 = 4, 6, 7, 8, 9, 10, 0


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(
    name: str,
    shape: tuple[int, ...] = (8,),
    kind: int = 0,
    offset: int = 0,
    sides: int | None = None,
) -> bytes:
    """Describe a tensor; shape is innermost side first, as in a file."""
    dims = struct.pack(f"<{len(shape)}Q", *shape)
    count = struct.pack("<I", len(shape) if sides is None else sides)
    return text(name) + count + dims + struct.pack("<IQ", kind, offset)


def header(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    counts: tuple[int, int] | None = None,
    data: int = 64,
) -> bytes:
    pairs, tensors = pairs or [], tensors or []
    numbers = counts if counts is not None else (len(tensors), len(pairs))
    whole = magic + version + struct.pack("<QQ", *numbers) + b"".join(pairs) + b"".join(tensors)
    return whole + bytes(-len(whole) % 32) + bytes(data)


def parsed(whole: bytes) -> Header:
    return parse_header(Path("x.gguf"), len(whole), lambda at, count: whole[at : at + count])


def test_all_kinds_of_values() -> None:
    array = struct.pack("<IQ", STRING, 2) + text("a") + text("é")
    floats = struct.pack("<IQ2f", F32, 2, 0.1, -1.5)
    found = parsed(
        header(
            [
                pair("n", U32, struct.pack("<I", 7)),
                pair("eps", F32, struct.pack("<f", 1e-5)),
                pair("yes", BOOL, b"\1"),
                pair("words", ARRAY, array),
                pair("floats", ARRAY, floats),
                pair("big", U64, struct.pack("<Q", 2**63)),
            ],
            [tensor("b", (4, 2), 0, 32), tensor("a", (2, 3, 1), 1)],
        )
    )
    assert found.metadata == {
        "n": 7, "eps": 1e-5, "yes": True, "words": ["a", "é"], "floats": [0.1, -1.5], "big": 2**63,
    }  # fmt: skip
    a, b = found.tensors["a"], found.tensors["b"]
    assert (a.type, a.shape, a.size_bytes) == ("F16", (1, 3, 2), 12)
    assert (b.type, b.shape, b.offset - a.offset) == ("F32", (2, 4), 32)
    assert a.offset % 32 == 0


HOSTILE: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "magic": lambda: header(magic=b"GGML"),
    "version 1": lambda: header(version=struct.pack("<I", 1)),
    "big-endian": lambda: header(version=struct.pack(">I", 3)),
    "many tensors": lambda: header(counts=(2**60, 0)),
    "many keys": lambda: header(counts=(0, 2**60)),
    "more tensors than bytes": lambda: header(counts=(2**17, 0)),
    "long string": lambda: header([pair("a", STRING, struct.pack("<Q", 2**60))]),
    "long key": lambda: header([struct.pack("<Q", 2**60)]),
    "key twice": lambda: header([pair("a", U8, b"1"), pair("a", U8, b"2")]),
    "unknown value": lambda: header([pair("a", 99, b"")]),
    "long array": lambda: header([pair("a", ARRAY, struct.pack("<IQ", U8, 2**60))]),
    "array beyond the end": lambda: header([pair("a", ARRAY, struct.pack("<IQ", U64, 2**20))]),
    "strings beyond the end": lambda: header([pair("a", ARRAY, struct.pack("<IQ", STRING, 2**20))]),
    "array of arrays": lambda: header([pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1))]),
    "array of nothing known": lambda: header([pair("a", ARRAY, struct.pack("<IQ", 77, 1))]),
    "alignment 0": lambda: header([pair("general.alignment", U32, bytes(4))]),
    "alignment 2^31": lambda: header([pair("general.alignment", U32, struct.pack("<I", 1 << 31))]),
    "alignment 24": lambda: header([pair("general.alignment", U32, struct.pack("<I", 24))]),
    "alignment as text": lambda: header([pair("general.alignment", STRING, text("32"))]),
    "unknown type": lambda: header(tensors=[tensor("a", kind=4)]),
    "no sides": lambda: header(tensors=[tensor("a", ())]),
    "five sides": lambda: header(tensors=[tensor("a", (1, 1, 1, 1, 1))]),
    "2^32 sides": lambda: header(tensors=[tensor("a", (1,), sides=2**32 - 1)]),
    "side 0": lambda: header(tensors=[tensor("a", (4, 0))]),
    "overflow": lambda: header(tensors=[tensor("a", (2**40, 2**40))]),
    "side of 2^63": lambda: header(tensors=[tensor("a", (2**63,))]),
    "half a block": lambda: header(tensors=[tensor("a", (33,), 2)]),
    "beyond the end": lambda: header(tensors=[tensor("a", offset=64)]),
    "offset of 2^63": lambda: header(tensors=[tensor("a", offset=2**63)]),
    "not aligned": lambda: header(tensors=[tensor("a", offset=8)]),
    "overlap": lambda: header(tensors=[tensor("a", (16,)), tensor("b", offset=32)]),
    "same place": lambda: header(tensors=[tensor("a"), tensor("b")]),
    "twice": lambda: header(tensors=[tensor("a"), tensor("a", offset=32)]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused(name: str) -> None:
    with pytest.raises(BadCheckpoint, match=r"x\.gguf"):
        parsed(HOSTILE[name]())


def test_every_shorter_file_is_refused() -> None:
    whole = header([pair("n", U32, bytes(4))], [tensor("a", (16,))])
    parsed(whole)
    for length in range(len(whole)):
        with pytest.raises(BadCheckpoint):
            parsed(whole[:length])


def test_names_of_parts() -> None:
    assert parts_of("a.gguf") == ["a.gguf"]
    assert parts_of("a-00002-of-00003.gguf") == [f"a-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert stem_of("a-b-00002-of-00003.gguf") == "a-b"
    assert stem_of("A.Q4_0.GGUF") == "A.Q4_0"
    for name in ("a-00000-of-00003.gguf", "a-00004-of-00003.gguf", "a-00001-of-99999.gguf"):
        with pytest.raises(BadCheckpoint):
            parts_of(name)


def part(number: int, count: int, name: str, total: int = 2) -> bytes:
    pairs = [
        pair("split.no", U32, struct.pack("<I", number)),
        pair("split.count", U32, struct.pack("<I", count)),
        pair("split.tensors.count", U32, struct.pack("<I", total)),
    ]
    return header(pairs, [tensor(name)])


def test_parts_are_joined_and_must_fit(tmp_path: Path) -> None:
    first, second = tmp_path / "x-00001-of-00002.gguf", tmp_path / "x-00002-of-00002.gguf"
    first.write_bytes(part(0, 2, "a"))
    with pytest.raises(BadCheckpoint, match="x-00002-of-00002"):
        read_gguf(first)
    second.write_bytes(part(1, 2, "b"))
    for path in (first, second):
        found = read_gguf(path)
        assert found.paths == (first, second)
        assert {name: t.path for name, t in found.tensors.items()} == {"a": first, "b": second}
    for wrong in (part(0, 2, "b"), part(1, 3, "b"), part(1, 2, "a"), b"GGUF"):
        second.write_bytes(wrong)
        with pytest.raises(BadCheckpoint):
            read_gguf(first)
    second.write_bytes(part(1, 2, "b"))
    first.write_bytes(part(0, 2, "a", total=3))
    with pytest.raises(BadCheckpoint):
        read_gguf(first)
