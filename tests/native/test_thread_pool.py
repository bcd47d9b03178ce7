"""The number of compute threads. test_drivers.py runs the C++ driver."""

import pytest

from moeinf.native import MAX_COMPUTE_THREADS, compute_threads, set_compute_threads


def test_the_number_of_threads_is_kept_and_checked():
    before = compute_threads()
    assert 1 <= before <= MAX_COMPUTE_THREADS
    try:
        set_compute_threads(3)
        assert compute_threads() == 3
        for wrong in (0, -1, MAX_COMPUTE_THREADS + 1):
            with pytest.raises(ValueError, match=r"1 \.\.\. 64"):
                set_compute_threads(wrong)
        assert compute_threads() == 3
    finally:
        set_compute_threads(before)
