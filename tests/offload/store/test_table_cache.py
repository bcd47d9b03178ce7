"""Test tables on disk: every row, whatever the cache, the files, and the order of requests."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from moeinf.native import PAGE_BYTES
from moeinf.offload.format import row_table
from moeinf.offload.format.row_blocks import packed
from moeinf.offload.format.row_table import (
    KEY_BYTES,
    LANDING_BYTES,
    RowForm,
    RowTable,
    is_intact,
    table_header,
    table_path,
)
from moeinf.offload.store import table_cache
from moeinf.offload.store.table_cache import CachedTable
from moeinf.offload.store.transfer import BlockReads, ExpertReadError

CASES = [  # width and format, rows of each file
    (160, "BF16", (700, 1, 36)),
    (3, "F32", (12, 5000)),
    (33, "Q8", (333,)),
    (1500, "F32", (9, 20)),  # a row is longer than a page
]


def written(folder: Path, table: RowTable) -> tuple[list[str], np.ndarray]:
    """Write a table of random rows; return its files, and its rows as bytes."""
    draw, paths, rows = np.random.default_rng(0), [], []
    for number, count in enumerate(table.rows):
        mine = draw.integers(0, 256, (count, table.row_bytes), np.uint8)
        path = folder / table_path(0, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(table_header(table, number) + packed(mine, table, 0))
        assert path.stat().st_size == table.file_bytes(number)
        paths.append(table_path(0, number))
        rows.append(mine)
    return paths, np.concatenate(rows)


@contextmanager
def opened(
    folder: Path, table: RowTable, cached_rows: int = 0, direct: bool = True
) -> Iterator[tuple[CachedTable, np.ndarray]]:
    paths, rows = written(folder, table)
    budget = LANDING_BYTES + cached_rows * (table.row_bytes + KEY_BYTES)
    given = table, folder, paths, lambda rows: rows, budget
    yield CachedTable(*given, direct_io=direct, model="tiny:q4"), rows


def some(draw: np.random.Generator, rows: int, count: int) -> Tensor:
    """Return row numbers, of which many are small and the same."""
    return torch.from_numpy((draw.random(count) ** 3 * rows).astype(np.int64))


@pytest.mark.parametrize("cached", [0, 40, 1 << 20])
@pytest.mark.parametrize(("width", "form", "rows"), CASES)
def test_every_row_is_the_row(
    width: int,
    form: RowForm,
    rows: tuple[int, ...],
    cached: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = RowTable("t", width, form, rows)
    for module in (row_table, table_cache):  # so that blocks come in batches of five
        monkeypatch.setattr(module, "LANDING_BYTES", 5 * table.block_bytes)
    draw, total = np.random.default_rng(1), sum(rows)
    with opened(tmp_path, table, cached) as (ours, expected):
        ends = torch.tensor([0, total - 1, rows[0] - 1, min(rows[0], total - 1)])
        for ids in (ends, torch.arange(total), *(some(draw, total, n) for n in (1, 16, 16, 300))):
            for wished in (ids, some(draw, total, 16)):  # right, and in vain
                ours.ahead(wished)
                found = ours.rows(ids)
                assert np.array_equal(found.numpy(), expected[ids.numpy()])
        before = ours.reads
        ours.ahead(ends)
        ours.rows(ends)
        assert ours.reads == before or cached < total  # all rows are in the cache
        assert ours.hits > 0


def test_a_block_is_read_once(tmp_path: Path) -> None:
    table = RowTable("t", 160, "BF16", (1200,))  # 12 rows of 320 bytes in a page
    with opened(tmp_path, table, 1200, direct=False) as (ours, _):
        ids = torch.tensor([5, 5, 0, 11, 12, 600, 5])
        ours.ahead(ids)
        assert ours.reads == 3
        ours.ahead(ids)
        ours.rows(ids)
        assert (ours.reads, ours.hits) == (3, 0)
        ours.rows(ids)
        assert (ours.reads, ours.hits) == (3, 5)


@pytest.mark.parametrize("ahead", [True, False])
def test_wrong_bytes_are_named(tmp_path: Path, ahead: bool) -> None:
    """A byte that changed, a block of another place, and a file that ends early."""
    table = RowTable("t", 160, "BF16", (120, 120))
    with opened(tmp_path, table, 0) as (ours, expected):
        path = tmp_path / table_path(0, 1)
        data = bytearray(path.read_bytes())
        data[3 * PAGE_BYTES + 77] ^= 1
        data[5 * PAGE_BYTES : 6 * PAGE_BYTES] = data[6 * PAGE_BYTES : 7 * PAGE_BYTES]
        path.write_bytes(data[: 9 * PAGE_BYTES])
        for block, words in ((2, "block 2 "), (4, "block 4 "), (9, "0001.rows")):
            ids = torch.tensor([0, 120 + 12 * block])
            if ahead:
                ours.ahead(ids)
            with pytest.raises(ExpertReadError, match=words) as caught:
                ours.rows(ids)
            assert caught.value.shard == table_path(0, 1)
            assert str(caught.value).startswith("tiny:q4: the table tables/T000/0001.rows cannot")
        good = torch.tensor([0, 121, 239 - 12 * 3])
        assert np.array_equal(ours.rows(good).numpy(), expected[good.numpy()])


def test_reads_that_hang_hold_their_places_until_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every place held, the next read is an error; later each place serves again."""
    table = RowTable("t", 1500, "F32", (9,))
    for module in (row_table, table_cache):
        monkeypatch.setattr(module, "LANDING_BYTES", 2 * table.block_bytes)
    hanging = True

    def wait(self: BlockReads, ticket: int) -> None:
        read(self, ticket)
        if hanging:
            raise TimeoutError(errno.ETIMEDOUT, "it does not answer")

    read = BlockReads.wait
    monkeypatch.setattr(BlockReads, "wait", wait)
    monkeypatch.setattr(BlockReads, "may_write", lambda self, slot: hanging)
    with opened(tmp_path, table) as (cached, rows):
        for place in range(3):
            words = "does not answer" if place < 2 else "hold every place"
            with pytest.raises(ExpertReadError, match=words):
                cached.rows(torch.tensor([place]))
        hanging = False
        for _ in range(2):
            found = cached.rows(torch.arange(9))
            assert np.array_equal(found.numpy(), rows)


def test_a_block_knows_its_number() -> None:
    table = RowTable("t", 160, "BF16", (24,))
    rows = np.zeros((24, 320), np.uint8)
    view = memoryview(packed(rows, table, 7))
    blocks = view[:PAGE_BYTES], view[PAGE_BYTES:]
    assert [is_intact(block, number) for block in blocks for number in (7, 8)] == [
        True, False, False, True,
    ]  # fmt: skip
    assert table.block_rows == 12
    assert table.disk_bytes == 3 * PAGE_BYTES
