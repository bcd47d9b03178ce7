"""Test the findings of the doctor in generated trees of /sys and /proc, on drives, of torch."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from moeinf.native import kernel_path
from moeinf.offload.format import direct_io
from moeinf.runtime.config import Settings
from moeinf.runtime.machine import diagnosis
from moeinf.runtime.machine.diagnosis import Finding, diagnose
from moeinf.runtime.machine.disk_bench import WHOLE_BLOCKS, Reading
from moeinf.runtime.machine.gpu import NoGpu
from moeinf.runtime.machine.measurements import Drive, remember


def written(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def found(name: str, home: Path, root: Path) -> Finding:
    settings = Settings(home=home, libcuda="libcuda-of-no-machine.so")
    (one,) = [finding for finding in diagnose(settings, root) if finding.name == name]
    return one


@pytest.mark.parametrize(
    ("text", "ok", "hint"),
    [
        ("always madvise [never]\n", False, "echo madvise | sudo tee /sys/"),
        ("always [madvise] never\n", True, ""),
        ("[always] madvise never\n", True, ""),
    ],
)
def test_huge_pages(text: str, ok: bool, hint: str, tmp_path: Path) -> None:
    written(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", text)
    one = found("huge_pages", tmp_path, tmp_path)
    assert (one.ok, one.hint[: len(hint)]) == (ok, hint)
    assert bool(one.hint) == bool(hint)


def test_a_kernel_without_huge_pages_has_no_command(tmp_path: Path) -> None:
    one = found("huge_pages", tmp_path, tmp_path)
    assert (one.ok, one.hint) == (False, "")


def test_a_cgroup_with_less_time_than_cores(tmp_path: Path) -> None:
    written(tmp_path, "sys/fs/cgroup/cpu.max", "50000 100000\n")
    one = found("cores", tmp_path, tmp_path)
    assert (one.ok, one.hint) == (False, "moeinf run MODEL --threads 1")
    assert "the time of 0.5" in one.fact
    written(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000\n")
    assert found("cores", tmp_path, tmp_path).ok


def test_a_cgroup_with_less_memory_than_the_machine(tmp_path: Path) -> None:
    written(tmp_path, "proc/meminfo", "MemAvailable: 4194304 kB\n")
    written(tmp_path, "proc/self/cgroup", "0::/small\n")
    written(tmp_path, "sys/fs/cgroup/small/memory.max", f"{64 << 20}\n")
    written(tmp_path, "sys/fs/cgroup/small/memory.current", f"{16 << 20}\n")
    fact = found("memory", tmp_path, tmp_path).fact
    assert fact.startswith("48.0 MiB of 64.0 MiB available; a cgroup limits")


@pytest.mark.parametrize("partition", [False, True])
@pytest.mark.parametrize(("kb", "ok"), [(0, False), (128, True), (8192, True)])
def test_read_ahead(kb: int, ok: bool, partition: bool, tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    drive = tmp_path / "sys/devices/sda"
    written(drive, "queue/read_ahead_kb", f"{kb}\n")
    place = drive / "sda1" if partition else drive
    place.mkdir(exist_ok=True)
    link = tmp_path / "sys/dev/block" / f"{os.major(device)}:{os.minor(device)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(place)
    one = found("read_ahead", tmp_path, tmp_path)
    assert (one.ok, one.fact.startswith(f"{kb} KiB")) == (ok, True)
    assert one.hint == ("" if ok else f"echo 128 | sudo tee {drive}/queue/read_ahead_kb")


def test_read_ahead_of_a_file_system_without_a_drive(tmp_path: Path) -> None:
    assert "not known" in found("read_ahead", tmp_path, tmp_path).fact


def test_a_drive_is_measured_by_devices(tmp_path: Path) -> None:
    assert found("disk_speed", tmp_path, tmp_path).hint == "moeinf devices"
    reading = Reading(8, WHOLE_BLOCKS, direct=True, bytes_per_s=2.5e9, in_flight=6)
    drive = Drive(reading, True, 4 << 20, "2026-01-01T00:00:00+00:00")
    settings = Settings(home=tmp_path)
    remember(settings, drive=(settings.models, drive))
    one = found("disk_speed", tmp_path, tmp_path)
    assert (one.ok, one.hint) == (True, "")
    assert one.fact.startswith("2.50 GB/s with 8 readers, past the page cache")


def test_direct_reads_leave_no_file(tmp_path: Path) -> None:
    found("direct_io", tmp_path, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_refuses_direct_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_io, "_DIRECT", 0)
    one = found("direct_io", tmp_path, tmp_path)
    assert (one.ok, one.hint.split("=")[0]) == (False, "MOEINF_HOME")


@pytest.mark.parametrize(
    ("gpu", "cuda", "ok", "hint"),
    [
        (NoGpu("none"), False, True, None),
        (NoGpu("none"), True, True, diagnosis.CPU_INDEX),
        ("A100", True, True, None),
        ("A100", False, False, "--force-reinstall torch"),
    ],
)
def test_torch_fits_the_gpu(
    gpu: str | NoGpu, cuda: bool, ok: bool, hint: str | None,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(diagnosis, "is_there", lambda _: gpu)
    monkeypatch.setattr(diagnosis, "_has_cuda", lambda: cuda)
    monkeypatch.setattr(diagnosis, "missing_for_kernels", lambda: None)
    one = found("torch", tmp_path, tmp_path)
    assert one.ok == ok
    assert one.hint.endswith(hint) if hint else not one.hint


@pytest.mark.parametrize(
    ("fast", "words"),
    [(True, ", attention "), (False, ": this processor has no vector instructions")],
)
def test_kernels(fast: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "kernels_are_fast", lambda: fast)
    one = found("kernels", tmp_path, tmp_path)
    assert (one.ok, one.hint) == (fast, "")  # another processor cannot be typed
    assert one.fact.startswith(kernel_path() + words)


def test_torch_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_package(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(diagnosis, "version_of", no_package)
    one = found("torch", tmp_path, tmp_path)
    assert (one.ok, one.fact) == (False, "not installed")
    assert one.hint == f"pip install torch --index-url {diagnosis.CPU_INDEX}"


class Triton:
    """Its driver, as after a build of the launcher that failed."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    @property
    def active(self) -> Any:
        if self.fault:
            raise RuntimeError(f"{self.fault}\nPlease specify via CC")
        return self

    utils = None


def put_triton(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    package, runtime = ModuleType("triton"), ModuleType("triton.runtime")
    package.__spec__ = ModuleSpec("triton", None)
    vars(runtime)["driver"] = Triton(fault)
    monkeypatch.setitem(sys.modules, "triton", package)
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)


@pytest.mark.parametrize(
    ("cuda", "available", "capability", "triton", "hint"),
    [
        (None, False, (9, 0), "", "pip install --force-reinstall torch"),
        ("13.0", False, (9, 0), "", "nvidia-smi"),  # the driver is too old
        ("13.0", True, (7, 5), "", "moeinf help run"),
        ("13.0", True, (9, 0), "Failed to find C compiler.", "apt install gcc python3-dev"),
        ("13.0", True, (9, 0), "", ""),
    ],
)
def test_what_a_gpu_lacks(
    cuda: str | None, available: bool, capability: tuple[int, int], triton: str, hint: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(diagnosis, "is_there", lambda _: "A100")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    put_triton(monkeypatch, triton)
    one = found("gpu", tmp_path, tmp_path)
    assert (one.ok, one.hint) == (not hint, hint)
    assert one.fact.startswith(
        "A100; `--device cuda`" if one.ok else "A100, which cannot be used: "
    )


def test_a_gpu_without_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "is_there", lambda _: "A100")
    monkeypatch.setitem(sys.modules, "triton", None)
    one = found("gpu", tmp_path, tmp_path)
    assert (one.ok, one.hint) == (False, "pip install triton")


def test_a_gpu_with_a_torch_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "is_there", lambda _: "A100")
    put_triton(monkeypatch, "")
    monkeypatch.setitem(sys.modules, "torch", None)
    one = found("gpu", tmp_path, tmp_path)
    assert (one.ok, one.hint) == (False, "pip install --force-reinstall torch")


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="the system has no direct I/O")
def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(**_options: object) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", read_only)
    one = found("direct_io", tmp_path, tmp_path)
    assert (one.ok, one.fact) == (False, "not known: Read-only file system")
    assert one.hint == "MOEINF_HOME=/a/folder/that/you/own"


def test_a_torch_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its libraries may be missing, or may not fit; the other findings are still shown."""
    (tmp_path / "torch").mkdir()
    words = "libcudart.so.12: cannot open shared object file: No such file or directory"
    (tmp_path / "torch/__init__.py").write_text(f"raise OSError({words!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    one = found("torch", tmp_path, tmp_path)
    assert (one.ok, one.hint) == (False, "pip install --force-reinstall torch")
    assert one.fact.endswith(f"cannot be imported: {words}")


def test_read_ahead_of_a_system_without_device_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(vars(os), "major")  # as on Windows
    one = found("read_ahead", tmp_path, tmp_path)
    assert (one.ok, one.fact, one.hint) == (True, "not known on this system", "")
