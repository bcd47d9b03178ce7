"""The queue's core and the file reader in C++: sanitizers, seeded faults, every interleaving.

Each driver's checks are listed at its top and in its main().
"""

import re
import subprocess

import pytest

from tests.native.drivers import (
    DEVICE_FAULTS,
    DEVICE_FILES,
    KERNEL_PROGRAMS,
    LOST_WAKE_UP,
    NEVER_BUSY,
    NEVER_YIELDS,
    NO_RESERVE,
    ONE_LOOK,
    PROGRAMS,
    SILENT_RAISE,
    SLOT_OF_THE_HUNG,
    YIELDS_TO_THE_QUEUED,
    Drivers,
    Fault,
    Program,
)

SCHEDULES = 12_000
SOME_SCHEDULES = 3_000
SCENES = 11
KERNEL_PATHS = ("portable", "avx2", "")  # "": the fastest one
KERNEL_RESULTS = 10 * 24 + 2  # formats, activations times counts, then slots and the router


def numbers(ended: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """Return the "name number" lines of a driver that exited without an error."""
    assert ended.returncode == 0, ended.stderr
    return {name: int(number) for name, number in map(str.split, ended.stdout.splitlines())}


@pytest.mark.full
@pytest.mark.parametrize(
    "program",
    [p for p in PROGRAMS if p.sanitizer and p.driver not in ("simulate_driver", "kernels_driver")],
    ids=lambda p: f"{p.driver}-{p.sanitizer}",
)
def test_real_threads_under_sanitizers(drivers: Drivers, program: Program, tmp_path):
    ended = drivers.run(program, str(tmp_path))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.full
@pytest.mark.timeout(600)  # with its build, beside other builds
@pytest.mark.parametrize("program", KERNEL_PROGRAMS, ids=lambda p: p.sanitizer)
def test_kernels_under_sanitizers(drivers: Drivers, program: Program):
    """Every path that this processor has computes the same bits, without a report."""
    results = set()
    for path in KERNEL_PATHS:
        ended = drivers.run(program, path)
        if (path, ended.returncode) == ("avx2", 3):
            continue  # not on this processor
        assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
        results.add(ended.stdout)
    assert len(results) == 1
    assert len(results.pop().splitlines()) == KERNEL_RESULTS


@pytest.mark.parametrize(
    "schedules", [SOME_SCHEDULES, pytest.param(SCHEDULES, marks=pytest.mark.full)]
)
def test_seeded_schedules_with_faults(drivers: Drivers, schedules: int):
    """Every kind of fault and of outcome must have occurred."""
    covered = numbers(drivers.run(Program("simulate_driver"), "1", str(schedules)))
    assert covered["schedules"] == schedules
    assert covered["tickets"] > 3 * schedules
    assert min(covered.values()) > schedules // 120, covered


@pytest.mark.full
def test_seeded_schedules_under_addresssanitizer(drivers: Drivers):
    program = Program("simulate_driver", sanitizer="address")
    ended = drivers.run(program, "100000", "1500")
    assert numbers(ended)["schedules"] == 1500
    assert "ERROR" not in ended.stderr


@pytest.mark.first
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(SLOT_OF_THE_HUNG, id="frees-the-slot-of-a-hung-read"),
        pytest.param(ONE_LOOK, id="takes-a-stopped-process-for-a-dead-disk"),
    ],
)
def test_a_seed_is_printed_and_plays_the_failure_again(drivers: Drivers, fault: Fault):
    program = Program("simulate_driver", fault=fault)
    ended = drivers.run(program, "1", str(SCHEDULES))
    assert ended.returncode != 0
    seed = re.search(r"^seed (\d+)$", ended.stderr, re.MULTILINE)
    assert seed, ended.stderr
    again = drivers.run(program, seed[1], "1")
    assert again.stderr == ended.stderr


@pytest.mark.full
def test_every_interleaving(drivers: Drivers):
    interleavings = numbers(drivers.run(Program("interleave_driver")))
    assert len(interleavings) == SCENES
    assert sum(interleavings.values()) > 300_000
    assert min(interleavings.values()) > 1_000


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "scene"),
    [
        pytest.param(LOST_WAKE_UP, "two_waiters", id="notify_one-for-all"),
        pytest.param(NO_RESERVE, "demand_overtakes_running_reads", id="no-reader-for-demand"),
        pytest.param(NEVER_BUSY, "speculation_waits_for_demand", id="speculation-shares-the-drive"),
        pytest.param(SILENT_RAISE, "raise_overtakes_a_running_read", id="raise-wakes-nobody"),
        pytest.param(NEVER_YIELDS, "demand_waits_for_a_piece_of_its_reader", id="never-yields"),
        pytest.param(
            YIELDS_TO_THE_QUEUED, "demand_waits_for_a_piece_of_another", id="shares-with-demand"
        ),
    ],
)
def test_the_checker_finds_faults(drivers: Drivers, fault: Fault, scene: str):
    """A mutated core deadlocks or fails a check in some interleaving, which the driver prints."""
    ended = drivers.run(Program("interleave_driver", fault=fault), scene)
    assert ended.returncode != 0
    checks = "every thread waits|order.size|most_at_once|!demand_queued"
    assert re.search(rf"not true: .*({checks})", ended.stderr)
    assert re.search(rf"^scene {scene}, choices( \d+)+$", ended.stderr, re.MULTILINE)


@pytest.mark.full
@pytest.mark.parametrize("fault", DEVICE_FAULTS, ids=("early-kernel", "early-copy", "early-done"))
def test_the_fake_device_finds_faults(drivers: Drivers, fault: Fault):
    """A missing wait shows as wrong bytes in some order that streams allow."""
    ended = drivers.run(Program("device_driver", DEVICE_FILES, fault=fault))
    assert ended.returncode != 0
    assert re.search(r"not true: kernel->slot\[i\] == kernel->version\nseed \d+", ended.stderr)
