"""Compile the native code for 64-bit Arm, and run its paths there, in an emulator.

It builds no wheel. It shows that the code compiles without x86 features, and that the queue's and
the pool's drivers pass. The kernels must give the same bits as on this machine, on every path.

    apt install g++-aarch64-linux-gnu qemu-user && python scripts/check_aarch64.py
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11

ROOT = Path(__file__).resolve().parents[1]
NATIVE, DRIVERS = ROOT / "native", ROOT / "tests" / "native"
COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static" if shutil.which("qemu-aarch64-static") else "qemu-aarch64"
PATHS = ("portable", "neon", "neon-i8mm")
FLAGS = ("-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-ffp-contract=off")
KERNELS = [
    "kernels/activations.cpp",
    "queue/crc32c.cpp",
    "kernels/expert_ffn.cpp",
    "kernels/amx/kernels.cpp",
    "kernels/avx2/interleaved.cpp",
    "kernels/avx2/kernels.cpp",
    "kernels/avx512/interleaved.cpp",
    "kernels/avx512/kernels.cpp",
    "kernels/kernels_portable.cpp",
    "kernels/neon/kernels.cpp",
    "kernels/neon/sets.cpp",
    "kernels/quantise.cpp",
    "kernels/quantise_blocks.cpp",
    "layer/router.cpp",
    "layer/slot_experts.cpp",
    "threads/thread_pool.cpp",
]


def main() -> None:
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is missing: apt install g++-aarch64-linux-gnu qemu-user")
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor() as pool:
        folder = Path(name)
        sources = sorted(NATIVE.rglob("*.cpp"))
        list(pool.map(lambda source: compile_module(source, folder), sources))
        print(f"{len(sources)} files of native/ compile for aarch64")
        run("copy_queue_driver", folder, [])
        run("thread_pool_driver", folder, ["threads/thread_pool.cpp"])
        run("simulate_driver", folder, [], "1", "200")
        run("file_reader_driver", folder, ["queue/file_reader.cpp"], str(folder))
        here = run("kernels_driver", folder, KERNELS, "", compiler="g++").splitlines()
        for path in PATHS:
            there = run("kernels_driver", folder, KERNELS, path)
            for line, other in zip(here, there.splitlines(), strict=True):
                if line != other:
                    sys.exit(f"{platform.machine()} computes {line}, {path} of aarch64 {other}")
    print(f"{len(here)} results of the kernels have the same bits as on {platform.machine()}")


def compile_module(source: Path, folder: Path) -> None:
    """Compile one file of the module, with this machine's Python headers: pointer sizes agree."""
    folders = (NATIVE, sysconfig.get_path("include"), pybind11.get_include())
    includes = [f"-I{path}" for path in folders]
    target = folder / f"{source.parent.name}-{source.stem}.o"
    command = [COMPILER, *FLAGS, "-fPIC", *includes, "-c", str(source), "-o", str(target)]
    subprocess.run(command, check=True)


def run(
    driver: str, folder: Path, sources: list[str], *arguments: str, compiler: str = COMPILER
) -> str:
    """Build a driver, run it and return its output; raise an exception when it fails."""
    path = folder / f"{driver}-{compiler}"
    files = [str(DRIVERS / f"{driver}.cpp"), *(str(NATIVE / source) for source in sources)]
    # GCC 12 warns about its own AVX-512 intrinsics; the module's build silences that where needed.
    options = [*FLAGS, "-pthread", "-w" if compiler == "g++" else "-static"]
    if not path.exists():
        subprocess.run(
            [compiler, *options, f"-I{NATIVE}", f"-I{DRIVERS}", "-o", str(path), *files], check=True
        )
    emulated = [] if compiler == "g++" else [EMULATOR, "-cpu", "max"]
    ended = subprocess.run(
        [*emulated, str(path), *arguments], check=True, capture_output=True, text=True, timeout=600
    )
    print(" ".join((driver, *arguments, "passes", f"({compiler})")))
    return ended.stdout


if __name__ == "__main__":
    main()
