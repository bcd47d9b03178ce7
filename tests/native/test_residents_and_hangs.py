"""The queue from Python: a resident expert costs nothing, and a hung read is an error.

hang_driver.cpp also tests hangs on real threads.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from moeinf.native import DEMAND, PAGE_BYTES, RESIDENT, CopyQueue, SlotPool, _native

SLOTS = 8


@pytest.fixture
def pool() -> SlotPool:
    return SlotPool(SLOTS, 2 * PAGE_BYTES)


@pytest.fixture
def queue(pool: SlotPool) -> Iterator[CopyQueue]:
    queue = CopyQueue(pool, readers=1)
    yield queue
    queue.close()


@pytest.fixture
def source(queue, make_shard):
    return make_shard("a").add_to(queue)


def test_a_resident_source_needs_no_ticket(queue, pool, make_shard):
    shards = [make_shard(name) for name in "ab"]
    a, b = (shard.add_to(queue) for shard in shards)
    queue.resume()
    queue.wait(queue.submit(a, 3, 1.0))
    assert queue.submit(a, 3, DEMAND) == RESIDENT
    other = queue.submit_many([a, a], [3, 4], 1.0)
    assert other == [RESIDENT, 2]
    queue.wait_many(other)
    for _ in range(2):
        queue.wait(RESIDENT)  # stays valid
    assert queue.cancel(RESIDENT) is False
    queue.raise_priority(RESIDENT, DEMAND)
    counters = queue.counters()
    assert (counters.submitted, counters.resident, counters.reads) == (2, 2, 2)
    queue.wait(queue.submit(b, 3, 1.0))  # another source
    assert shards[1].is_in(pool, 3)
    queue.wait(queue.submit(a, 3, 1.0))  # the first source again: it had been overwritten
    assert shards[0].is_in(pool, 3)
    memoryview(pool)[3, 0] = 0
    queue.invalidate(3)
    queue.wait(queue.submit(a, 3, 1.0))
    assert shards[0].is_in(pool, 3)
    for slot in (SLOTS, 2**64 - 1):
        with pytest.raises(IndexError):
            queue.invalidate(slot)
        with pytest.raises(IndexError):
            queue.can_submit(slot)
    with pytest.raises(IndexError, match="no source"):
        queue.submit(2**64 - 1, 0, 1.0)  # must differ from the mark of an untouched slot


def test_a_cancelled_read_leaves_the_slot_as_it_was(queue, pool, make_shard):
    shards = [make_shard(name) for name in "ab"]
    a, b = (shard.add_to(queue) for shard in shards)
    queue.resume()
    queue.wait(queue.submit(a, 0, 1.0))
    queue.pause()
    ticket = queue.submit(b, 0, 1.0)
    assert not queue.can_submit(0)
    assert queue.cancel(ticket)
    assert queue.can_submit(0)
    assert queue.submit(a, 0, 1.0) == RESIDENT
    assert shards[0].is_in(pool, 0)


def test_asking_for_a_resident_expert_costs_a_few_empty_calls(queue, source):
    """Compare submit and wait together with a bound function that does nothing."""
    queue.resume()
    queue.wait(queue.submit(source, 0, 1.0))
    empty, submit, wait = _native._nothing, queue.submit, queue.wait

    def calls(n: int) -> None:
        for _ in range(n):
            empty()

    def experts(n: int) -> None:
        for _ in range(n):
            wait(submit(source, 0, DEMAND))

    def seconds(loop) -> float:
        start = time.perf_counter()
        loop(2000)
        return time.perf_counter() - start

    # alternating; the best times count
    pairs = [(seconds(calls), seconds(experts)) for _ in range(100)]
    ratio = min(p[1] for p in pairs) / min(p[0] for p in pairs)
    assert ratio <= 6, ratio


@pytest.mark.linux("preloads a library")
def test_a_hung_read_is_a_timeout_that_names_the_file(make_shard, tmp_path):
    """A function that sleeps replaces pread.

    The waiter gets the error, and the process still exits.
    """
    shard = make_shard("a")
    library = tmp_path / "dead_disk.so"
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build the replacement of pread with")
    (tmp_path / "dead_disk.c").write_text(
        "#include <unistd.h>\n"
        "ssize_t pread(int f, void* b, size_t n, off_t o) { for (;;) sleep(100); }\n"
        "ssize_t pread64(int f, void* b, size_t n, off_t o) { for (;;) sleep(100); }\n"
    )
    build = ["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "dead_disk.c"]
    subprocess.run(build, check=True)
    program = f"""
from moeinf.native import CopyQueue, SlotPool
queue = CopyQueue(SlotPool(2, 8192), readers=1, hang_seconds=0.3)
source = queue.add_source({str(shard.path)!r}, 4096, 5000)
try:
    queue.wait(queue.submit(source, 0, 1.0))
except TimeoutError as error:
    assert error.filename == {str(shard.path)!r}, error
    assert "not ended for 0." in str(error), error
else:
    raise AssertionError
assert not queue.can_submit(0) and queue.counters().hung == 1
queue.close()
del queue
"""
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30, env=environment)
