"""Test the link of the simulator by hand: demand first, and reads ahead that yield in pieces."""

from __future__ import annotations

from moeinf.offload.simulator.clock import Link

READ, PIECE = 8.0, 2.0


def link() -> tuple[Link, list[int]]:
    """Return a link that takes every read, and the half-read cells that it drops."""
    dropped: list[int] = []
    return Link(READ, PIECE, lambda _cell: True, dropped.append), dropped


def test_demand_waits_for_one_piece() -> None:
    """The read ahead of 0-8 yields at 4 to a demand of 3. It goes on from 12 to 16."""
    found, _ = link()
    found.prefetch([1], 0.0)
    found.run_until(3.0)
    assert found.arriving == {1: 8.0}
    assert found.demand(3.0) == 4.0 + READ
    assert found.arriving == {1: 16.0}
    assert found.demand(3.0) == 20.0  # a second one waits for no further piece
    assert found.arriving == {1: 24.0}
    assert (found.arrived(23.0), found.arrived(24.0)) == ([], [1])


def test_the_last_piece_is_not_cut() -> None:
    found, _ = link()
    found.prefetch([1, 2], 0.0)
    found.run_until(7.0)
    assert found.demand(7.0) == 8.0 + READ
    assert found.arrived(8.0) == [1]
    found.run_until(17.0)
    assert found.arriving == {2: 24.0}  # speculation goes on when the demand has ended


def test_a_demand_for_the_cell_that_is_read_ahead() -> None:
    """It does not yield, and demand that comes with it follows it."""
    found, _ = link()
    found.prefetch([1], 0.0)
    found.run_until(3.0)
    found.hasten([5, 1])
    assert found.demand(3.0) == 8.0 + READ
    assert found.arriving.pop(1) == 8.0


def test_a_half_read_cell_is_dropped_when_no_longer_wished_for() -> None:
    for prefetches, end in (([1, 3], 16.0), ([3], None)):
        found, dropped = link()
        found.prefetch([1], 0.0)
        found.run_until(3.0)
        found.demand(3.0)
        found.prefetch(prefetches, 3.0)
        assert found.arriving.get(1) == end
        assert dropped == ([] if end else [1])
        found.run_until(13.0)
        assert found.arriving.get(3) == (None if end else 20.0)


def test_a_running_read_is_not_dropped() -> None:
    found, dropped = link()
    found.prefetch([1], 0.0)
    found.run_until(3.0)
    found.prefetch([2], 3.0)
    assert (found.arriving, dropped) == ({1: 8.0}, [])
