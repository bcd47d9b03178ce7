"""The lower bound of a token's time with a GPU, from the simulator and from the disk."""

from __future__ import annotations

import pytest

from benchmarks.gpu_floor import Floor, Speeds, TokenBytes, floor
from moeinf.offload.simulator.clock import DeviceSpeeds

_SPEEDS = Speeds(30e9, 50e9, DeviceSpeeds(20e9, 30e9, 1000e9))


@pytest.mark.parametrize(
    ("took", "inside", "seconds"),
    [
        (TokenBytes(10e9, 40e9, 0, 0), True, 0.010 + 0.040),
        # the other parts take 20 ms meanwhile
        (TokenBytes(10e9, 40e9, 1e9, 0), True, 0.010 + 0.040),
        (TokenBytes(10e9, 40e9, 5e9, 0), True, 0.010 + 0.100),
        (TokenBytes(10e9, 40e9, 5e9, 0), False, 0.200 + 0.100),  # dense weights in RAM
        (TokenBytes(10e9, 40e9, 5e9, 0.2e9), True, 0.010 + 0.100),  # in parallel with the rest
        (TokenBytes(10e9, 40e9, 5e9, 1e9), True, 0.500),
    ],
)
def test_what_runs_at_the_same_time_counts_once(
    took: TokenBytes, inside: bool, seconds: float
) -> None:
    assert floor(took, _SPEEDS, inside, 2e9).seconds == pytest.approx(seconds)


def test_without_reads_the_disk_has_no_part() -> None:
    assert floor(TokenBytes(1e9, 0, 0, 0), _SPEEDS, True, None) == Floor(0.001, 0.0, 0.0, 0.0)
