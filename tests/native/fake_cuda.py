"""The fake libcuda from Python: build it once, configure it, and read its counters.

One process has one fake: `Fake.reset` restores its initial state between tests.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_libcuda.cpp")
_FLAGS = ("-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread", "-shared", "-fPIC")
_NAME = "-Wl,-soname,libnvidia-ml.so.1"  # a later load of NVML by name finds this library
_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def built_fake(folder: Path, version: int = 13000) -> Path:
    """Return the library, in a folder that outlives the tests; skip without a compiler."""
    flags = (*_FLAGS, f"-DFAKE_CUDA={version}")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build the fake libcuda with")
    parts = (SOURCE, *(SOURCE.with_name(name) for name in ("fake_nvml.h", "fake_streams.h")))
    source = b"".join(part.read_bytes() for part in parts)
    digest = hashlib.sha256(source + repr((flags, _NAME)).encode()).hexdigest()[:16]
    library = folder / f"libfakecuda-{digest}.so"
    if not library.exists():
        # other processes may build it, too
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch, library.name)
            subprocess.run([compiler, *flags, _NAME, "-o", str(made), str(SOURCE)], check=True)
            made.replace(library)
    return library


class Fake:
    """Control of the library that the product has loaded, too."""

    def __init__(self, library: Path) -> None:
        self.path = str(library)
        self._calls = ctypes.CDLL(self.path)
        self._calls.fake_count.restype = ctypes.c_long
        self._calls.cuLaunchHostFunc.argtypes = [ctypes.c_void_p, _HostFunction, ctypes.c_void_p]
        self._kept: list[object] = []  # callbacks must outlive their call

    def reset(self, words: str = "") -> None:
        """Reset the fake while nothing is queued; fake_libcuda.cpp documents the words."""
        if self.count("allocated"):
            gc.collect()  # tracebacks keep failed objects alive
        self._kept.clear()
        self._calls.fake_reset(words.encode())

    def configure(self, words: str) -> None:
        self._calls.fake_configure(words.encode())

    def count(self, name: str) -> int:
        """Return the number of calls of a name, or a figure.

        Figures are "allocated", "registered", "handles", "bytes copied" and others.
        """
        return int(self._calls.fake_count(name.encode()))

    def launch(self, stream: int, function: Callable[[], None]) -> None:
        """Queue a "kernel": Python code that runs when the stream reaches it."""
        callback = _HostFunction(lambda _: function())
        self._kept.append(callback)
        code = self._calls.cuLaunchHostFunc(stream or None, callback, None)
        if code:
            raise RuntimeError(f"cuLaunchHostFunc: {code}")

    def synchronise(self, stream: int) -> None:
        """Wait for the stream with its context current, like torch."""
        popped = ctypes.c_void_p()
        self._calls.cuCtxPushCurrent_v2(ctypes.c_void_p(self._context()))
        code = self._calls.cuStreamSynchronize(ctypes.c_void_p(stream))
        self._calls.cuCtxPopCurrent_v2(ctypes.byref(popped))
        if code:
            raise RuntimeError(f"cuStreamSynchronize: {code}")

    def _context(self) -> int:
        held = ctypes.c_void_p()
        self._calls.cuDevicePrimaryCtxRetain(ctypes.byref(held), 0)
        self._calls.cuDevicePrimaryCtxRelease_v2(0)
        return held.value or 0


def view(address: int, size_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """Return device memory of the fake, which is host memory."""
    return (ctypes.c_char * size_bytes).from_address(address)
