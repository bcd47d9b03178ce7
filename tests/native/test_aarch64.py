"""The paths of aarch64, in an emulator: skipped without a cross compiler or without QEMU."""

import pytest

from tests.native.drivers import ATTENTION_FILES, KERNEL_FILES, Drivers, Program
from tests.native.test_drivers import KERNEL_RESULTS

KERNELS = Program("kernels_driver", KERNEL_FILES, aarch64=True)
ATTENTION = Program("attention_driver", ATTENTION_FILES, aarch64=True)
NO_PATH = 3  # the exit status where the processor lacks the path
SHAPES = 7

pytestmark = pytest.mark.timeout(600)  # with a build, beside other builds


def results(drivers: Drivers, program: Program, path: str) -> list[str]:
    ended = drivers.run(program, path)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    return ended.stdout.splitlines()


def test_kernels_have_the_same_bits(drivers: Drivers) -> None:
    wanted = results(drivers, KERNELS, "portable")
    assert len(wanted) == KERNEL_RESULTS
    for path in ("neon", "neon-i8mm"):
        assert results(drivers, KERNELS, path) == wanted


@pytest.mark.parametrize(
    ("processor", "path"), [("cortex-a72", "neon"), ("neoverse-n1", "neon-i8mm")]
)
def test_a_processor_without_the_instruction_lacks_the_path(
    drivers: Drivers, processor: str, path: str
) -> None:
    assert drivers.run(KERNELS, path, processor=processor).returncode == NO_PATH


@pytest.mark.full
def test_attention_against_float64(drivers: Drivers) -> None:
    """Float caches have portable's bits. Those in q8 have a form of their own."""
    portable, neon = (results(drivers, ATTENTION, path) for path in ("portable", "neon"))
    assert len(neon) == 3 * SHAPES
    assert neon[: 2 * SHAPES] == portable[: 2 * SHAPES]
    assert all(one != other for one, other in zip(neon, portable, strict=True) if "q8" in one)
