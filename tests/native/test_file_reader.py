"""Read real files through the queue, and inject system-call failures in the C++ driver."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moeinf.native import (
    PAGE_BYTES,
    SHARD_DATA_OFFSET,
    CopyQueue,
    CorruptShard,
    SlotPool,
    crc32c,
    most_open_files,
)

resource = pytest.importorskip("resource", reason="needs limits of processes, which Windows lacks")
MODES = pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])


@pytest.fixture
def pool():
    return SlotPool(4, 5 * PAGE_BYTES)


def count_in(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


def read(queue: CopyQueue, source: int, slot: int = 0) -> None:
    queue.wait(queue.submit(source, slot, 0.0))


@MODES
@pytest.mark.parametrize("payload_bytes", [1, 4095, 4096, 4097, 8191, 5 * 4096 - 1, 5 * 4096])
def test_any_length_arrives(make_shard, pool, direct, payload_bytes):
    shard = make_shard("a", payload_bytes)
    queue = CopyQueue(pool, readers=1, direct=direct)
    read(queue, shard.add_to(queue), slot=2)
    assert shard.is_in(pool, 2)
    counters = queue.counters()
    assert (counters.reads, counters.bytes_read) == (1, payload_bytes)
    assert counters.read_seconds > 0


@MODES
def test_a_range_in_the_middle_of_a_file_leaves_the_neighbours_alone(make_shard, pool, direct):
    shard = make_shard("a", 4 * PAGE_BYTES)
    queue = CopyQueue(pool, direct=direct)
    wanted = shard.payload[PAGE_BYTES : PAGE_BYTES + 100]
    offset = SHARD_DATA_OFFSET + PAGE_BYTES
    read(queue, queue.add_source(shard.path, offset, 100, crc32c(wanted)), slot=1)
    view = memoryview(pool)
    assert bytes(view.cast("B")[pool.slot_bytes :][:100]) == wanted
    assert bytes(view.cast("B")[: pool.slot_bytes]) == bytes(pool.slot_bytes)
    assert bytes(view.cast("B")[2 * pool.slot_bytes :]) == bytes(2 * pool.slot_bytes)


@MODES
def test_a_truncated_file_names_the_path_and_both_counts(make_shard, pool, direct):
    shard = make_shard("cut", 9000)
    os.truncate(shard.path, SHARD_DATA_OFFSET + 5000)
    queue = CopyQueue(pool, direct=direct)
    with pytest.raises(CorruptShard, match="wanted 9000 bytes at offset 4096, got 5000") as caught:
        read(queue, shard.add_to(queue))
    assert (caught.value.errno, caught.value.filename) == (errno.ENODATA, str(shard.path))


@MODES
@pytest.mark.parametrize("left", [0, 100, SHARD_DATA_OFFSET])
def test_a_file_cut_before_its_data_has_nothing(make_shard, pool, direct, left):
    shard = make_shard("cut", 9000)
    os.truncate(shard.path, left)
    queue = CopyQueue(pool, direct=direct)
    with pytest.raises(CorruptShard, match="got 0"):
        read(queue, shard.add_to(queue))


@MODES
@pytest.mark.parametrize("at", [0, 4999, 2500])
def test_a_flipped_bit_names_the_path_and_both_checksums(make_shard, pool, direct, at):
    shard = make_shard("flipped", 5000)
    bad = bytearray(shard.payload)
    bad[at] ^= 0x10
    with shard.path.open("r+b") as file:
        file.seek(SHARD_DATA_OFFSET)
        file.write(bad)
    queue = CopyQueue(pool, direct=direct)
    both = f"expected crc32c 0x{shard.crc32c:08x}, got 0x{crc32c(bad):08x}"
    with pytest.raises(CorruptShard, match=both) as caught:
        read(queue, shard.add_to(queue))
    assert isinstance(caught.value, OSError)
    assert (caught.value.errno, caught.value.filename) == (errno.EBADMSG, str(shard.path))
    assert str(shard.path) in str(caught.value)
    assert queue.counters().reads == 2  # it was read a second time


def test_an_unchecked_source_is_taken_as_it_is(make_shard, pool):
    shard = make_shard("a")
    shard.path.write_bytes(bytes(shard.path.stat().st_size))
    queue = CopyQueue(pool)
    read(queue, shard.add_to(queue, checked=False))
    assert bytes(memoryview(pool).cast("B")[:5000]) == bytes(5000)


def test_a_repaired_file_is_found_again(make_shard, pool, tmp_path):
    """A repair replaces the file by rename; the reader must not keep the old one open."""
    shard = make_shard("a")
    good = shard.path.read_bytes()
    shard.path.write_bytes(bytes(len(good)))
    queue = CopyQueue(pool)
    source = shard.add_to(queue)
    with pytest.raises(CorruptShard):
        read(queue, source)
    (tmp_path / "new").write_bytes(good)
    (tmp_path / "new").rename(shard.path)
    read(queue, source)
    assert shard.is_in(pool, 0)


@MODES
def test_a_missing_file_is_file_not_found(tmp_path, pool, direct):
    queue = CopyQueue(pool, direct=direct)
    source = queue.add_source(tmp_path / "none", 0, 10)
    with pytest.raises(FileNotFoundError) as caught:
        read(queue, source)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(tmp_path / "none"))
    assert queue.direct is direct  # only EINVAL means that O_DIRECT is refused


@MODES
def test_a_directory_is_refused(tmp_path, pool, direct):
    queue = CopyQueue(pool, direct=direct)
    with pytest.raises(IsADirectoryError):
        read(queue, queue.add_source(tmp_path, 0, 10))
    assert queue.direct is direct


@MODES
def test_a_symbolic_link_is_refused(make_shard, pool, tmp_path, direct):
    shard = make_shard("a")
    link = tmp_path / "link"
    link.symlink_to(shard.path)
    queue = CopyQueue(pool, direct=direct)
    with pytest.raises(OSError, match="cannot open") as caught:
        read(queue, queue.add_source(link, 0, 10))
    assert caught.value.errno == errno.ELOOP


@MODES
def test_a_fifo_is_refused_without_waiting_for_its_writer(tmp_path, pool, direct):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    queue = CopyQueue(pool, direct=direct)
    source = queue.add_source(fifo, 0, 10)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read, queue, source)
        try:
            with pytest.raises(OSError, match="not a regular file"):
                reading.result(timeout=10)
        finally:
            os.close(os.open(fifo, os.O_RDWR | os.O_NONBLOCK))  # releases a hung reader


def test_a_file_without_permission_is_named(make_shard, pool):
    if os.geteuid() == 0:
        pytest.skip("root may read anything")
    shard = make_shard("a")
    shard.path.chmod(0)
    queue = CopyQueue(pool)
    with pytest.raises(PermissionError):
        read(queue, shard.add_to(queue))


def test_names_that_are_not_text_come_back_in_the_error(tmp_path, pool):
    name = os.fsencode(tmp_path) + b"/\xff\xfe"
    queue = CopyQueue(pool)
    with pytest.raises(FileNotFoundError) as caught:
        read(queue, queue.add_source(name, 0, 10))
    assert os.fsencode(caught.value.filename) == name


@pytest.mark.linux("reads /proc")
@MODES
def test_more_files_than_descriptors(make_shard, pool, direct):
    shards = [make_shard(f"E{i:03}", 100 + i) for i in range(40)]
    queue = CopyQueue(pool, readers=2, direct=direct, max_open_files=5)
    sources = [shard.add_to(queue) for shard in shards]
    before = count_in("/proc/self/fd")
    for _ in range(2):
        for first in range(0, 40, 4):
            queue.wait_many(queue.submit_many(sources[first : first + 4], range(4), 1.0))
            assert all(shards[first + slot].is_in(pool, slot) for slot in range(4))
            assert queue.open_files <= 5
            assert count_in("/proc/self/fd") - before <= 5 + 2
    queue.close()
    del queue
    assert count_in("/proc/self/fd") == before


@pytest.mark.linux("reads /proc")
def test_queues_share_one_bound_of_files(make_shard, pool):
    """A quarter of the limit as it is now; the file that was used least recently is closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shards = [make_shard(f"E{i:03}", 100 + i) for i in range(60)]
    queues = [CopyQueue(pool, readers=1) for _ in range(3)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        assert most_open_files() == 50
        before = count_in("/proc/self/fd")
        for number, shard in enumerate(shards):
            queue = queues[number % 3]
            read(queue, shard.add_to(queue))
            assert shard.is_in(pool, 0)
        assert sum(queue.open_files for queue in queues) == 50
        assert count_in("/proc/self/fd") - before <= 50
        assert [queue.open_files for queue in queues] in ([17, 17, 16], [17, 16, 17], [16, 17, 17])
        queues[0].close()
        assert queues[0].open_files == 0
        assert count_in("/proc/self/fd") - before <= 34
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.linux("uses /dev/shm")
def test_direct_falls_back_where_the_file_system_refuses(pool):
    """The bytes must be right with and without O_DIRECT; older tmpfs in /dev/shm refuses it."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    path = Path(f"/dev/shm/moeinf-test-{os.getpid()}")
    payload = os.urandom(5000)
    try:
        path.write_bytes(bytes(SHARD_DATA_OFFSET) + payload)
        queue = CopyQueue(pool, direct=True)
        read(queue, queue.add_source(path, SHARD_DATA_OFFSET, 5000, crc32c(payload)))
        assert bytes(memoryview(pool).cast("B")[:5000]) == payload
        assert queue.direct
        assert queue.direct_refusals <= 1
    finally:
        path.unlink(missing_ok=True)


def test_the_file_descriptor_bound_must_be_positive(pool):
    with pytest.raises(ValueError, match="max_open_files"):
        CopyQueue(pool, max_open_files=0)
