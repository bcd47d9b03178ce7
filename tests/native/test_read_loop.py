"""The read loop: plausible speeds in every variant, and invalid arguments."""

import pytest

from moeinf.native import PAGE_BYTES, read_bandwidth

MIB = 1 << 20


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("huge_pages", [False, True])
def test_any_variant_reads_faster_than_a_disk(threads, prefetch, huge_pages):
    speed = read_bandwidth(8 * MIB, threads, prefetch, huge_pages, 3)
    assert 0.2e9 < speed < 20e12


def test_a_page_per_thread_is_the_least():
    assert read_bandwidth(2 * PAGE_BYTES, 2, True, False, 1) > 0
    for wrong in [(PAGE_BYTES, 2, 1), (MIB, 0, 1), (MIB, 1, 0), (2**63, 1, 1)]:
        with pytest.raises(ValueError, match="a read loop needs"):
            read_bandwidth(wrong[0], wrong[1], True, False, wrong[2])
