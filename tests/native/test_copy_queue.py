"""The queue from Python: order, ends and deliveries, errors, shutdown, the GIL.

copy_queue_driver.cpp tests the order with a read in progress, because a test can hold its reader.
Here pause() holds the reader threads before a read.
"""

import gc
import math
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moeinf.native import (
    DEMAND,
    MAX_READERS,
    PAGE_BYTES,
    Cancelled,
    CopyQueue,
    CorruptShard,
    SlotPool,
)

SLOTS = 70


@pytest.fixture
def pool():
    return SlotPool(SLOTS, 2 * PAGE_BYTES)


@pytest.fixture
def queue(pool):
    queue = CopyQueue(pool, readers=1)
    queue.pause()
    yield queue
    queue.close()


@pytest.fixture
def source(queue, make_shard):
    return make_shard("a").add_to(queue)


@pytest.fixture
def missing(queue, tmp_path):
    return queue.add_source(tmp_path / "missing", 0, 10)


def until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.001)


def threads_of_this_process() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def order_of_ending(queue: CopyQueue) -> list[int]:
    queue.resume()
    queue.drain()
    return [ticket for ticket, _ in queue.collect()]


def test_demand_overtakes_all_speculation(queue, source):
    speculative = [queue.submit(source, slot, 0.5) for slot in range(64)]
    demand = queue.submit(source, 64, DEMAND)
    assert order_of_ending(queue) == [demand, *speculative]


def test_larger_is_more_urgent_and_equals_are_served_in_turn(queue, source):
    priorities = [0.0, 2.0, -1.0, 2.0, 1e300, 0.0, -math.inf, DEMAND]
    tickets = [queue.submit(source, slot, p) for slot, p in enumerate(priorities)]
    assert order_of_ending(queue) == [tickets[i] for i in (7, 4, 1, 3, 0, 5, 2, 6)]


def test_demand_is_the_largest_priority():
    assert sys.float_info.max < DEMAND


def test_raise_priority_moves_up_only_and_keeps_age(queue, source):
    tickets = [queue.submit(source, slot, 1.0) for slot in range(5)]
    queue.raise_priority(tickets[3], 5.0)
    queue.raise_priority(tickets[2], 5.0)  # older than 3
    queue.raise_priority(tickets[0], 0.5)  # lower
    queue.raise_priority(tickets[4], DEMAND)
    assert order_of_ending(queue) == [tickets[i] for i in (4, 2, 3, 0, 1)]
    queue.raise_priority(tickets[0], DEMAND)  # ended and collected: no effect


def test_a_ticket_fills_its_slot(queue, pool, make_shard):
    shards = [make_shard(f"E{i}", 5000 + i) for i in range(6)]
    sources = [shard.add_to(queue) for shard in shards]
    tickets = queue.submit_many(sources, [5, 4, 3, 2, 1, 0], 1.0)
    queue.resume()
    queue.wait_many(tickets)
    assert all(shard.is_in(pool, 5 - i) for i, shard in enumerate(shards))


def test_a_source_is_replaced_while_nothing_reads_it(queue, pool, make_shard, tmp_path):
    (tmp_path / "b").write_bytes(bytes(PAGE_BYTES) + b"b" * PAGE_BYTES)
    first, other = (make_shard(name).add_to(queue) for name in ("a", "c"))
    moved = [tmp_path / "b"], [PAGE_BYTES], PAGE_BYTES
    ticket = queue.submit(first, 3, DEMAND)
    with pytest.raises(RuntimeError, match=f"source {first} belongs to live ticket {ticket}"):
        queue.replace_sources([first], *moved)
    queue.resume()
    queue.wait(ticket)
    for wrong, error in (([9], IndexError), ([first, other], ValueError)):
        with pytest.raises(error):
            queue.replace_sources(wrong, *moved)
    assert queue.submit(first, 3, DEMAND) == 0  # it is in the slot
    queue.replace_sources([first], *moved)
    queue.wait(queue.submit(first, 3, DEMAND))
    assert memoryview(pool).tobytes()[6 * PAGE_BYTES : 7 * PAGE_BYTES] == b"b" * PAGE_BYTES


def test_counters_follow_the_tickets(queue, source, missing):
    assert queue.counters().submitted == 0
    tickets = queue.submit_many([source, source, missing], [0, 1, 2], 1.0)
    queue.cancel(tickets[1])
    counters = queue.counters()
    assert (counters.submitted, counters.queued, counters.cancelled) == (3, 2, 1)
    queue.resume()
    queue.drain()
    counters = queue.counters()
    assert (counters.queued, counters.running, counters.done, counters.errors) == (0, 0, 1, 1)
    assert (counters.reads, counters.bytes_read, counters.undelivered) == (1, 5000, 3)
    assert len(queue.collect()) == 3
    assert queue.counters().undelivered == 0


def test_cancel_frees_the_slot_and_wakes_the_waiter(queue, source):
    ticket = queue.submit(source, 0, 1.0)
    with ThreadPoolExecutor(1) as threads:
        waiter = threads.submit(queue.wait, ticket)
        until(lambda: queue.counters().waiting == 1)
        assert queue.cancel(ticket) is True
        with pytest.raises(Cancelled, match="cancelled"):
            waiter.result(timeout=10)
    assert queue.cancel(ticket) is False
    again = queue.submit(source, 0, 1.0)
    queue.resume()
    queue.wait(again)


def test_a_done_ticket_cannot_be_cancelled(queue, source):
    ticket = queue.submit(source, 0, 1.0)
    queue.resume()
    queue.drain()
    assert queue.cancel(ticket) is False
    queue.wait(ticket)


def test_two_live_tickets_never_share_a_slot(queue, source):
    ticket = queue.submit(source, 7, 1.0)
    with pytest.raises(RuntimeError, match=f"slot 7 belongs to live ticket {ticket}"):
        queue.submit(source, 7, DEMAND)
    with pytest.raises(RuntimeError, match="slot 7"):
        queue.submit_many([source, source], [6, 7], 1.0)
    with pytest.raises(RuntimeError, match="twice"):
        queue.submit_many([source, source], [9, 9], 1.0)
    assert queue.counters().submitted == 1  # all or none
    queue.resume()
    queue.drain()
    queue.submit(source, 7, 1.0)  # ended, though not yet delivered: the slot is free


def test_wrong_arguments_are_refused(queue, source, tmp_path):
    with pytest.raises(IndexError, match="no source 5: there are 1"):
        queue.submit(5, 0, 1.0)
    with pytest.raises(IndexError, match=f"no slot {SLOTS}: there are {SLOTS}"):
        queue.submit(source, SLOTS, 1.0)
    with pytest.raises(ValueError, match="must be a number"):
        queue.submit(source, 0, math.nan)
    with pytest.raises(ValueError, match="2 sources for 1 slots"):
        queue.submit_many([source, source], [0], 1.0)
    ticket = queue.submit(source, 0, 1.0)
    with pytest.raises(ValueError, match="must be a number"):
        queue.raise_priority(ticket, math.nan)
    for unknown in (ticket + 1, 2**64 - 1):
        for method in (queue.wait, queue.cancel, lambda t: queue.raise_priority(t, 1.0)):
            with pytest.raises(ValueError, match="never issued"):
                method(unknown)
    with pytest.raises(ValueError, match="never issued"):
        queue.wait_many([ticket, ticket + 1])
    for offset, length, why in [
        (1, 10, "not a multiple of 4096"),
        (4095, 10, "not a multiple of 4096"),
        (0, 0, "0 bytes do not fit"),
        (0, 8193, "8193 bytes do not fit a slot of 8192"),
        (2**63 - 4096, 4096, "too large"),
    ]:
        with pytest.raises(ValueError, match=why):
            queue.add_source(tmp_path, offset, length)
    with pytest.raises(TypeError):
        queue.add_source(tmp_path, 0, 10, 2**32)
    assert queue.counters().submitted == 1


@pytest.mark.parametrize("readers", [0, -1, 65, 2**31 - 1])
def test_the_number_of_readers_is_bounded(pool, readers):
    with pytest.raises(ValueError, match=f"readers must be from 1 to {MAX_READERS}"):
        CopyQueue(pool, readers=readers)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
def test_a_hang_takes_time(pool, seconds):
    with pytest.raises(ValueError, match="hang_seconds"):
        CopyQueue(pool, hang_seconds=seconds)


def test_an_end_is_delivered_once(queue, source):
    waited, collected = queue.submit_many([source, source], [0, 1], 1.0)
    queue.resume()
    queue.wait(waited)
    queue.drain()
    assert queue.collect() == [(collected, None)]
    assert queue.collect() == []
    for ticket in (waited, collected):
        with pytest.raises(ValueError, match="already been waited for or collected"):
            queue.wait(ticket)


def test_collect_hands_out_the_exceptions(queue, source, missing, make_shard):
    bad = make_shard("bad")
    corrupt = bad.add_to(queue)
    bad.path.write_bytes(bytes(20_000))
    tickets = queue.submit_many([source, missing, corrupt, source], [0, 1, 2, 3], 1.0)
    queue.cancel(tickets[3])
    queue.resume()
    queue.drain()
    ended = dict(queue.collect())
    assert sorted(ended) == tickets
    kinds = [type(ended[ticket]) for ticket in tickets]
    assert kinds == [type(None), FileNotFoundError, CorruptShard, Cancelled]


def test_errors_reach_exactly_their_waiters(queue, source, missing):
    tickets = queue.submit_many([source, missing, source, missing], [0, 1, 2, 3], 1.0)
    with ThreadPoolExecutor(12) as threads:
        waiters = [(t, threads.submit(queue.wait, t)) for t in tickets for _ in range(3)]
        until(lambda: queue.counters().waiting == 12)
        queue.resume()
        for ticket, waiter in waiters:
            error = waiter.exception(timeout=10)
            expected = FileNotFoundError if ticket in (tickets[1], tickets[3]) else type(None)
            assert type(error) is expected
    assert queue.counters().undelivered == 0


def test_wait_many_delivers_the_first_failure_only(queue, source, missing, tmp_path):
    other = queue.add_source(tmp_path / "other", 0, 10)
    tickets = queue.submit_many([source, missing, other], [0, 1, 2], 1.0)
    queue.resume()
    with pytest.raises(FileNotFoundError, match="missing"):
        queue.wait_many(tickets)
    rest = dict(queue.collect())
    assert rest[tickets[0]] is None
    assert str(tmp_path / "other") == getattr(rest[tickets[2]], "filename", None)
    assert len(rest) == 2


def test_wait_many_takes_nothing_and_duplicates(queue, source):
    queue.wait_many([])
    ticket = queue.submit(source, 0, 1.0)
    queue.resume()
    queue.wait_many([ticket, ticket])
    assert queue.counters().undelivered == 0


def test_python_runs_while_a_thread_waits(queue, source):
    ticket = queue.submit(source, 0, 1.0)
    waiter = threading.Thread(target=queue.wait, args=(ticket,))
    waiter.start()
    until(lambda: queue.counters().waiting == 1)
    assert sum(range(100_000)) == 4999950000  # this thread has the GIL
    assert waiter.is_alive()
    queue.resume()
    waiter.join(timeout=10)
    assert not waiter.is_alive()


def test_drain_waits_for_what_is_queued(queue, source):
    queue.submit(source, 0, 1.0)
    with ThreadPoolExecutor(1) as threads:
        drained = threads.submit(queue.drain)
        until(lambda: queue.counters().waiting == 1)
        assert not drained.done()
        queue.resume()
        drained.result(timeout=10)
    assert queue.counters().done == 1


def test_a_signal_ends_a_wait_and_leaves_the_ticket(queue, source):
    ticket = queue.submit(source, 0, 1.0)

    def interrupt() -> None:
        until(lambda: queue.counters().waiting == 1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        queue.wait(ticket)
    queue.resume()
    queue.wait(ticket)


def test_close_cancels_what_is_queued(queue, source):
    tickets = queue.submit_many([source] * 30, range(30), 1.0)
    with ThreadPoolExecutor(33) as threads:
        waiters = [threads.submit(queue.wait, ticket) for ticket in tickets]
        until(lambda: queue.counters().waiting == 30)
        for closer in [threads.submit(queue.close) for _ in range(3)]:
            closer.result(timeout=10)
        for waiter in waiters:
            with pytest.raises(Cancelled, match="closed"):
                waiter.result(timeout=10)
    queue.close()
    queue.drain()
    with pytest.raises(RuntimeError, match="closed"):
        queue.submit(source, 0, 1.0)
    assert queue.counters().cancelled == 30


@pytest.mark.parametrize("round_", range(5))
def test_close_in_the_middle_of_reading(pool, make_shard, round_):
    shard = make_shard("a", 8000)
    queue = CopyQueue(pool, readers=3)
    tickets = queue.submit_many([shard.add_to(queue)] * SLOTS, range(SLOTS), 1.0)
    until(lambda: queue.counters().done >= round_ * 10)
    queue.close()
    ended = dict(queue.collect())
    assert sorted(ended) == tickets
    for slot, ticket in enumerate(tickets):
        if ended[ticket] is None:
            assert shard.is_in(pool, slot)
        else:
            assert isinstance(ended[ticket], Cancelled)


@pytest.mark.linux("reads /proc")
def test_the_queue_keeps_its_pool_and_closes_when_collected(make_shard):
    pool = SlotPool(4, 2 * PAGE_BYTES)
    queue = CopyQueue(pool, readers=2)
    shard = make_shard("a")
    source = shard.add_to(queue)
    del pool
    gc.collect()
    queue.wait(queue.submit(source, 3, 1.0))
    queue.submit_many([source] * 4, range(4), 1.0)
    before = threads_of_this_process()
    del queue
    gc.collect()
    assert threads_of_this_process() == before - 2


def test_a_process_exits_with_tickets_queued(make_shard):
    shard = make_shard("a")
    program = f"""
from moeinf.native import CopyQueue, SlotPool
pool = SlotPool(4, 8192)
queue = CopyQueue(pool, readers=4)
source = queue.add_source({str(shard.path)!r}, 4096, 5000)
queue.submit_many([source] * 4, range(4), 1.0)
queue.pause()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


def test_a_forked_child_can_drop_the_queue(make_shard):
    """The reader threads do not exist in the child: joining them would hang."""
    program = """
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork with threads
from moeinf.native import CopyQueue, SlotPool
queue = CopyQueue(SlotPool(4, 8192), readers=4)
child = os.fork()
if child == 0:
    queue.close()
    del queue
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
