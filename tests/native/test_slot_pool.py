"""The arena: shape, alignment, sharing without copies, lifetime, and impossible sizes."""

import ctypes
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from moeinf.native import PAGE_BYTES, SlotPool

MIB = 1 << 20


def address(pool: SlotPool) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pool))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("asked", "rounded"),
    [(1, 4096), (4095, 4096), (4096, 4096), (4097, 8192), (3 * MIB + 1, 3149824)],
)
def test_slot_bytes_are_rounded_up_to_a_page(asked, rounded):
    pool = SlotPool(3, asked)
    assert (pool.slots, pool.slot_bytes, pool.bytes) == (3, rounded, 3 * rounded)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(1, 1), (5, 4097), (3, 3 * MIB), (2, 2 * MIB)])
def test_the_arena_is_aligned_and_zeroed(slots, slot_bytes):
    pool = SlotPool(slots, slot_bytes)
    assert address(pool) % (2 * MIB) == 0
    assert bytes(memoryview(pool).cast("B")) == bytes(pool.bytes)


def test_the_buffer_is_a_writable_uint8_array_of_slots():
    pool = SlotPool(4, 5000)
    view = memoryview(pool)
    assert (view.shape, view.strides, view.format) == ((4, 8192), (8192, 1), "B")
    assert not view.readonly
    assert view.c_contiguous


def test_views_share_the_memory():
    numpy = pytest.importorskip("numpy")
    pool = SlotPool(2, PAGE_BYTES)
    array = numpy.frombuffer(pool, dtype=numpy.uint8).reshape(pool.slots, pool.slot_bytes)
    array[1, 7] = 42
    assert memoryview(pool)[1, 7] == 42
    memoryview(pool)[0, 0] = 9
    assert array[0, 0] == 9


def test_torch_views_share_the_memory_and_keep_the_arena():
    torch = pytest.importorskip("torch")
    pool = SlotPool(2, PAGE_BYTES)
    tensor = torch.frombuffer(pool, dtype=torch.uint8).view(pool.slots, pool.slot_bytes)
    assert tensor.data_ptr() == address(pool)
    tensor[1, 3] = 77
    assert memoryview(pool)[1, 3] == 77
    del pool
    gc.collect()
    assert tensor[1, 3] == 77


@pytest.mark.linux("reads /proc")
def test_views_keep_the_arena_alive_and_the_last_one_frees_it():
    pool = SlotPool(1, 64 * MIB)
    memoryview(pool)[0, 0] = 1
    before = resident_bytes()
    view = memoryview(pool)
    del pool
    gc.collect()
    flat = view.cast("B")
    flat[::PAGE_BYTES] = bytes(len(flat[::PAGE_BYTES]))
    assert resident_bytes() - before > 32 * MIB
    del view, flat
    gc.collect()
    assert resident_bytes() - before < 32 * MIB


def test_the_pool_is_collected_with_its_last_view():
    pool = SlotPool(1, 1)
    collected: list[bool] = []
    weakref.finalize(pool, collected.append, True)
    view = memoryview(pool)
    del pool
    gc.collect()
    assert collected == []
    del view
    gc.collect()
    assert collected == [True]


@pytest.mark.linux("reads /proc")
@pytest.mark.parametrize("slots", [1, 3, 700])
def test_resident_memory_never_exceeds_the_arena(slots):
    """Measured in a fresh process: one byte of each slot is touched, then every page."""
    program = f"""
from moeinf.native import SlotPool
import os
def resident():
    with open("/proc/self/smaps") as maps:
        lines = iter(maps)
        for line in lines:
            if line.startswith(f"{{base:x}}-"):
                return next(int(row.split()[1]) * 1024 for row in lines if row.startswith("Rss:"))
import ctypes
pool = SlotPool({slots}, 12000)
base = ctypes.addressof(ctypes.c_char.from_buffer(pool))
view = memoryview(pool).cast("B")
for slot in range(pool.slots):
    view[slot * pool.slot_bytes] = 1
assert 0 < resident() <= pool.bytes, (resident(), pool.bytes)
view[:] = bytes(pool.bytes)
assert resident() == pool.bytes, (resident(), pool.bytes)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("slots", "slot_bytes"),
    [(1, 2**63), (2**63, 2**63), (2**32, 2**32), (1, 2**64 - 1), (2**52, 4096), (1, 2**62)],
)
def test_what_no_process_can_address_is_a_memory_error(slots, slot_bytes):
    with pytest.raises(MemoryError, match=f"{slots} slots of {slot_bytes} bytes"):
        SlotPool(slots, slot_bytes)


@pytest.mark.linux("reads /proc")
def test_what_this_machine_does_not_have_is_a_memory_error_naming_the_bytes():
    bytes_ = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 100
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1":
        pytest.skip("this kernel grants any size (vm.overcommit_memory = 1)")
    with pytest.raises(MemoryError, match=str(bytes_)):
        SlotPool(1, bytes_)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 1), (1, 0), (0, 0)])
def test_nothing_is_refused(slots, slot_bytes):
    with pytest.raises(ValueError, match="at least one"):
        SlotPool(slots, slot_bytes)


def test_negative_numbers_are_refused():
    with pytest.raises(TypeError):
        SlotPool(-1, 4096)
