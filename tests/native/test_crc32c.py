"""Compare crc32c with published vectors and a bit-by-bit reference."""

import array
import functools
import random
import threading
from pathlib import Path

import pytest

from moeinf.native import crc32c
from moeinf.native._native import _crc32c_on, _crc32c_paths

PATHS = [functools.partial(_crc32c_on, path) for path in _crc32c_paths()]

# RFC 3720, appendix B.4, and the check value of the catalogue of CRCs.
RFC_READ_COMMAND = bytes.fromhex(
    "01c00000 00000000 00000000 00000000 14000000 00000400 00000014 00000018"
    "28000000 00000000 02000000 00000000"
)
VECTORS = [
    (b"", 0x00000000),
    (b"a", 0xC1D04330),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (RFC_READ_COMMAND, 0xD9963A56),
]


def _table() -> list[int]:
    table = []
    for byte in range(256):
        state = byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
        table.append(state)
    return table


TABLE = _table()


def reference(data: bytes, crc: int = 0) -> int:
    state = crc ^ 0xFFFFFFFF
    for byte in data:
        state = (state >> 8) ^ TABLE[(state ^ byte) & 255]
    return state ^ 0xFFFFFFFF


@pytest.mark.parametrize("function", [*PATHS, reference])
@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_published_vectors(function, data, expected):
    assert function(data) == expected


@pytest.mark.linux("reads /proc")
def test_the_paths_that_the_processor_has_are_known():
    flags = set(Path("/proc/cpuinfo").read_text().split())
    instruction = "sse4_2" in flags or "crc32" in flags
    assert _crc32c_paths() == ["instruction"] * instruction + ["portable"]


def test_an_unknown_path_is_refused():
    with pytest.raises(ValueError, match="no path fast"):
        _crc32c_on("fast", b"")


@pytest.mark.parametrize("function", PATHS)
def test_every_length_and_alignment_around_the_short_blocks(function):
    data = random.Random(1).randbytes(1700)
    view = memoryview(data)
    lengths = [*range(40), *range(510, 530), *range(760, 785), 1023, 1024, 1025, 1535, 1536, 1600]
    for length in lengths:
        for start in range(9):
            piece = view[start : start + length]
            assert function(piece) == reference(bytes(piece)), (length, start)


@pytest.mark.parametrize(
    "length", [3 * 8192 - 1, 3 * 8192, 3 * 8192 + 777, 6 * 8192 + 3 * 256 + 13]
)
@pytest.mark.parametrize("start", [0, 1, 7])
def test_lengths_around_the_long_block(length, start):
    data = memoryview(random.Random(length).randbytes(length + start))[start:]
    expected = reference(bytes(data))
    assert [function(data) for function in PATHS] == [expected] * len(PATHS)


@pytest.mark.parametrize("function", PATHS)
def test_any_split_continues(function):
    generator = random.Random(2)
    data = generator.randbytes(60_000)
    whole = function(data)
    for _ in range(50):
        cut = generator.randrange(len(data) + 1)
        assert function(data[cut:], function(data[:cut])) == whole
    assert function(data[5:], reference(data[:5], 0)) == whole


def test_paths_agree_on_random_buffers_and_begin_values():
    generator = random.Random(3)
    for _ in range(200):
        data = generator.randbytes(generator.randrange(50_000))
        crc = generator.getrandbits(32)
        assert len({function(data, crc) for function in [crc32c, *PATHS]}) == 1


def test_every_flipped_bit_shows():
    data = bytearray(random.Random(4).randbytes(2000))
    whole = crc32c(data)
    for bit in range(0, len(data) * 8, 61):
        data[bit // 8] ^= 1 << bit % 8
        assert crc32c(data) != whole
        data[bit // 8] ^= 1 << bit % 8


def test_any_contiguous_buffer_is_accepted():
    numbers = array.array("I", [1, 2, 3])
    assert crc32c(numbers) == reference(numbers.tobytes())
    assert crc32c(bytearray(b"123456789")) == 0xE3069283
    assert crc32c(buffer=b"456789", crc=crc32c(b"123")) == 0xE3069283


def test_what_is_not_a_contiguous_buffer_is_refused():
    with pytest.raises(BufferError):
        crc32c(memoryview(b"123456789")[::2])
    with pytest.raises(TypeError):
        crc32c("text")
    with pytest.raises(TypeError):
        crc32c(b"", -1)
    with pytest.raises(TypeError):
        crc32c(b"", 2**32)


def test_threads_agree():
    data = random.Random(5).randbytes(1 << 20)
    expected = crc32c(data)
    seen: list[int] = []
    threads = [threading.Thread(target=lambda: seen.append(crc32c(data))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [expected] * 4
