"""Build the C++ drivers of this folder, with a sanitizer or a planted fault, and cache them.

A program is rebuilt when a header, its sources, the flags or the compiler change. A fault replaces
text in a copy of native/, so the product has no test hooks.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "native"
BUILD_TIMEOUT_S = 480  # the kernels take 75 s of processor time
RUN_TIMEOUT_S = 120  # a driver that deadlocks is killed and fails
_FLAGS = ("-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread")
# The flags of CMakeLists.txt. GCC 12 warns about its own AVX-512 intrinsics when instrumented.
_KERNEL_FLAGS = ("-ffp-contract=off", "-w")
_CROSS_COMPILER = "aarch64-linux-gnu-g++"
_EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")  # Debian's qemu-user and qemu-user-static
_NO_SANITIZER = ("libtsan", "libasan", "libubsan", "cannot find -l")


@dataclass(frozen=True)
class Fault:
    """One replacement in one file of native/ that must make a driver fail."""

    file: str
    right: str
    wrong: str


@dataclass(frozen=True)
class Program:
    """A program of tests/native/<driver>.cpp and files of native/, with -fsanitize=<sanitizer>.

    One for aarch64 runs in an emulator. `zig` is clang from the package ziglang.
    """

    driver: str
    sources: tuple[str, ...] = ()
    sanitizer: str = ""
    fault: Fault | None = field(default=None)
    aarch64: bool = False
    zig: bool = False

    @property
    def flags(self) -> list[str]:
        more = ["-rdynamic"] if self.driver == "device_driver" else []  # it is its own libcuda
        if self.driver in ("attention_driver", "kernels_driver"):
            more += _KERNEL_FLAGS
        if self.zig:
            more += ["-fno-sanitize=undefined"]  # zig instruments by default
        if self.aarch64:
            more += ["-static"]  # the emulator needs no libraries of that processor
        if self.sanitizer:
            more += [f"-fsanitize={self.sanitizer}", "-fno-sanitize-recover=all"]
        return [*_FLAGS, *more]


QUEUE_FILES = (
    "queue/copy_queue.cpp",
    "queue/crc32c.cpp",
    "queue/file_reader.cpp",
    "queue/slot_pool.cpp",
)
DEVICE_FILES = (
    "device/cuda_driver.cpp",
    "device/device_slots.cpp",
    "device/host_lock.cpp",
    "queue/slot_pool.cpp",
)
KERNEL_FILES = (
    "kernels/activations.cpp",
    "kernels/amx/kernels.cpp",
    "kernels/avx2/interleaved.cpp",
    "kernels/avx2/kernels.cpp",
    "kernels/avx512/interleaved.cpp",
    "kernels/avx512/kernels.cpp",
    "kernels/expert_ffn.cpp",
    "kernels/kernels_portable.cpp",
    "kernels/neon/kernels.cpp",
    "kernels/neon/sets.cpp",
    "kernels/quantise.cpp",
    "kernels/quantise_blocks.cpp",
    "layer/router.cpp",
    "layer/slot_experts.cpp",
    "queue/crc32c.cpp",
    "threads/thread_pool.cpp",
)
ATTENTION_FILES = (
    "attention/decode_attention.cpp",
    "attention/decode_attention_bf16.cpp",
    "attention/decode_attention_lanes.cpp",
    "attention/kv_q8.cpp",
    "kernels/kernels_portable.cpp",
    "kernels/neon/kernels.cpp",
    "kernels/neon/sets.cpp",
    "queue/crc32c.cpp",
    "threads/thread_pool.cpp",
)
KERNEL_PROGRAMS = tuple(
    Program("kernels_driver", KERNEL_FILES, sanitizer)
    for sanitizer in ("thread", "address,undefined")
)
LOST_WAKE_UP = Fault(
    "queue/copy_queue_impl.h", "    changed_.notify_all();\n}", "    changed_.notify_one();\n}"
)
NO_RESERVE = Fault(
    "queue/copy_queue_life.h", "speculative_limit(std::max(1, live))", "std::max(1, live)"
)
NEVER_YIELDS = Fault(
    "queue/copy_queue_life.h", "!closing_ && demand_comes_first()", "!closing_ && false"
)
YIELDS_TO_THE_QUEUED = Fault(
    "queue/copy_queue_life.h", "running.priority == kDemand &&", "false &&"
)
NEVER_BUSY = Fault("queue/copy_queue_life.h", "most - static_cast<int>(counters_.running)", "most")
SILENT_RAISE = Fault("queue/copy_queue_impl.h", "if (priority == kDemand) work_.notify_one();", "")
SLOT_OF_THE_HUNG = Fault(
    "queue/copy_queue_life.h", "slots_[record.slot].owner = running.ticket;", ""
)
ONE_LOOK = Fault(
    "queue/copy_queue_life.h", "now - running.overdue < sure", "now - running.since < sure"
)
EARLY_KERNEL = Fault("device/device_slots.cpp", "wait_for(compute_, arriving);", "")
EARLY_COPY = Fault("device/device_slots.cpp", "wait_for(stream_, readers);", "")
EARLY_DONE = Fault(
    "device/device_slots.cpp",
    "if (!context_->done(flying_.front().second->event)) return false;",
    "",
)
INTERLEAVING_FAULTS = (
    LOST_WAKE_UP,
    NEVER_BUSY,
    NEVER_YIELDS,
    NO_RESERVE,
    SILENT_RAISE,
    YIELDS_TO_THE_QUEUED,
)
DEVICE_FAULTS = (EARLY_KERNEL, EARLY_COPY, EARLY_DONE)
PROGRAMS = (
    *(
        Program(driver, sources, sanitizer)
        for sanitizer in ("thread", "address")
        for driver, sources in (
            ("copy_queue_driver", ()),
            ("device_driver", DEVICE_FILES),
            ("file_reader_driver", ("queue/file_reader.cpp",)),
            ("hang_driver", QUEUE_FILES),
            ("thread_pool_driver", ("threads/thread_pool.cpp",)),
        )
    ),
    *KERNEL_PROGRAMS,
    Program("simulate_driver"),
    Program("simulate_driver", sanitizer="address"),
    *(Program("simulate_driver", fault=f) for f in (SLOT_OF_THE_HUNG, ONE_LOOK)),
    Program("interleave_driver"),
    *(Program("interleave_driver", fault=f) for f in INTERLEAVING_FAULTS),
    *(Program("device_driver", DEVICE_FILES, fault=f) for f in DEVICE_FAULTS),
)


class Drivers:
    """Programs in a folder that outlives the tests, built by one thread per core."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1)
        self._builds: dict[Program, Future[Path]] = {}

    def start(self, programs: Iterable[Program]) -> None:
        """Start to build missing programs."""
        for program in programs:
            if program not in self._builds:
                self._builds[program] = self._pool.submit(_built, program, self._folder)

    def run(
        self, program: Program, *arguments: str, processor: str = "max"
    ) -> subprocess.CompletedProcess[str]:
        """Run a program and return its output. An emulator plays `processor`, a name of QEMU's.

        Skips the test where it cannot be built or run.
        """
        emulator = [_emulator(), "-cpu", processor] if program.aarch64 else []
        self.start([program])
        ended = subprocess.run(
            [*emulator, str(self._builds[program].result()), *arguments],
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
        )
        if "unexpected memory mapping" in ended.stderr:
            pytest.skip("this ThreadSanitizer cannot run with the kernel's address randomisation")
        return ended

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _emulator() -> str:
    for name in _EMULATORS:
        if found := shutil.which(name):
            return found
    pytest.skip(f"no {_EMULATORS[0]} to run programs for aarch64 with")


def _compiler(program: Program) -> tuple[str, ...]:
    if program.zig:
        if importlib.util.find_spec("ziglang") is None:
            pytest.skip("pip install ziglang")
        return (sys.executable, "-m", "ziglang", "c++")
    name = _CROSS_COMPILER if program.aarch64 else "g++"
    if (found := shutil.which(name)) is None:
        pytest.skip(f"no {name} to build the driver with")
    return (found,)


def _built(program: Program, folder: Path) -> Path:
    compiler = _compiler(program)
    path = folder / f"{program.driver}-{_digest(program, compiler)}"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        place = Path(scratch)
        native = NATIVE if program.fault is None else _with_fault(program.fault, place)
        made = place / "program"
        build = subprocess.run(
            [*compiler, *program.flags, f"-I{native}", f"-o{made}"]
            + [str(Path(__file__).with_name(f"{program.driver}.cpp"))]
            + [str(native / source) for source in program.sources],
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
        )
        if build.returncode != 0 and any(sign in build.stderr for sign in _NO_SANITIZER):
            pytest.skip(f"g++ has no library for -fsanitize={program.sanitizer}")
        assert build.returncode == 0, build.stderr
        made.replace(path)
    return path


def _with_fault(fault: Fault, place: Path) -> Path:
    copy = place / "native"
    shutil.copytree(NATIVE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    text = (copy / fault.file).read_text()
    assert text.count(fault.right) == 1, f"{fault.file} must have one {fault.right!r}"
    (copy / fault.file).write_text(text.replace(fault.right, fault.wrong))
    return copy


def _digest(program: Program, compiler: tuple[str, ...]) -> str:
    here = Path(__file__).parent
    files = [*NATIVE.rglob("*.h"), *here.glob("*.h"), here / f"{program.driver}.cpp"]
    files += here.glob("fake_*.cpp")
    files += [NATIVE / source for source in program.sources]
    digest = hashlib.sha256(repr((program, program.flags, _version(compiler))).encode())
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _version(compiler: tuple[str, ...]) -> str:
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
