"""Reads of tables: past the page cache, many at once, and within the budget of RAM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeinf.offload.format.row_table import KEY_BYTES, LANDING_BYTES, RowTable, table_path
from moeinf.offload.store import table_cache
from moeinf.offload.store.transfer import BlockReads
from moeinf.runtime.machine.page_cache import cached_share
from tests.offload.store.test_table_cache import opened
from tests.runtime.machine.test_page_cache import forget


@pytest.mark.linux("calls posix_fadvise")
@pytest.mark.parametrize("direct", [True, False])
def test_direct_reads_leave_nothing_in_the_page_cache(direct: bool, tmp_path: Path) -> None:
    """Other reads do, so that the measurement means something."""
    table = RowTable("t", 1500, "F32", (64,))  # a row is a block of two pages
    with opened(tmp_path, table, direct=direct) as (ours, expected):
        path = tmp_path / table_path(0, 0)
        forget(path)
        if cached_share([path]) == 1.0:
            pytest.skip("this file system keeps its files in memory")
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            pytest.skip("this file system has no direct reads")
        ids = torch.arange(0, 64, 3)
        ours.ahead(ids)
        assert np.array_equal(ours.rows(ids).numpy(), expected[ids.numpy()])
        assert (cached_share([path]) == 0.0) == direct


def test_all_blocks_of_a_token_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are queued before one is waited for, and the queue has many readers."""
    readers: list[int] = []
    calls: list[int] = []  # reads that are queued; 0: one is waited for

    class Watched(BlockReads):
        def __init__(self, *given: Any, **named: Any) -> None:
            readers.append(named["readers"])
            super().__init__(*given, **named)

        def start(self, slots: list[int], *given: Any) -> list[int]:
            calls.append(len(slots))
            return super().start(slots, *given)

        def wait(self, ticket: int) -> None:
            calls.append(0)
            super().wait(ticket)

    monkeypatch.setattr(table_cache, "BlockReads", Watched)
    table = RowTable("t", 160, "BF16", (1200,))  # 12 rows of 320 bytes in a block
    with opened(tmp_path, table) as (ours, expected):
        ids = torch.arange(0, 1200, 12)
        found = ours.rows(ids)
        assert np.array_equal(found.numpy(), expected[ids.numpy()])
    assert readers == [32]
    assert calls == [100, *[0] * 100]


@pytest.mark.parametrize("rows", [0, 1, 40, 5000])
def test_the_cache_is_within_its_budget(rows: int, tmp_path: Path) -> None:
    """A budget below the landing places takes these, and one above the table the whole table."""
    table = RowTable("t", 160, "BF16", (700, 500))
    each = table.row_bytes + KEY_BYTES
    budget = LANDING_BYTES + rows * each + 3
    assert table.cache_bytes(budget) == min(budget, LANDING_BYTES + 1200 * each)
    assert table.cache_bytes(5) == LANDING_BYTES
    with opened(tmp_path, table, rows) as (ours, expected):
        held = ours._landings.nbytes + ours._cache.nbytes + ours._keys.nbytes
        assert held == LANDING_BYTES + max(1, min(rows, 1200)) * each
        everything = torch.arange(1200)
        for _ in range(3):
            before = ours.hits
            assert np.array_equal(ours.rows(everything).numpy(), expected)
        assert ours.hits - before <= max(rows, 1)
        assert (ours.hits - before == 1200) == (rows >= 1200)
