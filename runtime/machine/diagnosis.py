"""Find what this installation and machine can do, and what to type where something is missing.

Everything is read; nothing is measured, changed or kept. One file of a page is written into the
home and removed, to ask its file system for direct I/O. A `root` other than / is for tests.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Literal

from moeinf.native import PAGE_BYTES, attention_path, kernel_path, kernels_are_fast
from moeinf.offload.format.direct_io import is_direct
from moeinf.runtime.config import Settings
from moeinf.runtime.machine.gpu import NoGpu, is_there, missing_for_kernels, torch_fault
from moeinf.runtime.machine.measurements import remembered_drive
from moeinf.runtime.machine.memory import available_bytes, core_count, total_bytes
from moeinf.runtime.machine.network_home import network_type
from moeinf.runtime.sizes import format_bytes
from moeinf.runtime.system import physical_bytes

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LEAST_READ_AHEAD_KB = 128  # Linux's default
_THP = "sys/kernel/mm/transparent_hugepage/enabled"

Name = Literal[
    "kernels", "torch", "gpu", "cores", "memory", "huge_pages", "disk_space", "direct_io",
    "disk_speed", "read_ahead", "file_system", "locale", "terminal",
]  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One checked thing.

    ok    False: something is missing that costs speed or a feature
    fact  what was found, in words
    hint  what to type, if something is missing and a command can help; else empty
    """

    name: Name
    ok: bool
    fact: str
    hint: str = ""


def diagnose(settings: Settings, root: Path = Path("/")) -> list[Finding]:
    """Return what was found of the kernels, torch, the GPU, memory and the models' drive."""
    gpu = is_there(settings.libcuda)
    return [
        _kernels(),
        _torch(gpu),
        _gpu(gpu),
        _cores(root),
        _memory(root),
        _huge_pages(root),
        _disk_space(settings),
        _direct_io(settings),
        _disk_speed(settings),
        _read_ahead(settings, root),
        _file_system(settings, root),
    ]


def _kernels() -> Finding:
    path, attention = kernel_path(), attention_path()
    if kernels_are_fast():
        return Finding("kernels", True, f"{path}, attention {attention}")
    why = "this processor has no vector instructions that moeinf uses (AVX2 with FMA, AVX-512)"
    return Finding("kernels", False, f"{path}: {why}, and computes slowly")


def _torch(gpu: str | NoGpu) -> Finding:
    """Describe torch by its package's version alone, as 2.11.0+cpu: no import is needed."""
    try:
        found = version_of("torch")
    except PackageNotFoundError:
        return Finding(
            "torch", False, "not installed", "pip install torch --index-url " + CPU_INDEX
        )
    if (fault := torch_fault()) is not None:
        return Finding("torch", False, f"{found}: {fault}", "pip install --force-reinstall torch")
    cuda = _has_cuda()
    if isinstance(gpu, NoGpu) and cuda:
        fact = f"{found} with CUDA, which takes gigabytes of disk and finds no GPU"
        return Finding(
            "torch", True, fact, f"pip install --force-reinstall torch --index-url {CPU_INDEX}"
        )
    if not isinstance(gpu, NoGpu) and not cuda:
        return Finding(
            "torch", False, f"{found} without CUDA", "pip install --force-reinstall torch"
        )
    return Finding("torch", True, f"{found} {'with' if cuda else 'without'} CUDA")


def _has_cuda() -> bool:
    import torch  # noqa: PLC0415 - the other checks do without it

    return torch.version.cuda is not None


def _gpu(gpu: str | NoGpu) -> Finding:
    if isinstance(gpu, NoGpu):
        return Finding("gpu", True, f"none ({gpu.why}); the CPU computes")
    missing = missing_for_kernels()
    if missing is None:
        return Finding("gpu", True, f"{gpu}; `--device cuda` uses it")
    hint = "moeinf help run"
    if "Triton is not" in missing:
        hint = "pip install triton"
    elif "Triton cannot" in missing:
        hint = "apt install gcc python3-dev"
    elif "driver" in missing:
        hint = "nvidia-smi"  # shows the newest CUDA that the driver can run
    elif "torch" in missing:
        hint = "pip install --force-reinstall torch"
    return Finding("gpu", False, f"{gpu}, which cannot be used: {missing}", hint)


def _cores(root: Path) -> Finding:
    usable, there = core_count(), os.cpu_count() or 1
    fact = f"{usable} of {there} usable"
    with suppress(OSError, ValueError):
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        share = int(quota) / int(period)  # "max", no limit, is not a number
        fact += f"; a cgroup allows the time of {share:.1f}"
        if share < usable:
            return Finding("cores", False, fact, f"moeinf run MODEL --threads {max(1, int(share))}")
    return Finding("cores", True, fact)


def _memory(root: Path) -> Finding:
    free, limit, physical = available_bytes(root), total_bytes(root), physical_bytes()
    fact = f"{format_bytes(free)} of {format_bytes(limit)} available"
    if limit < physical:
        fact += f"; a cgroup limits the machine's {format_bytes(physical)}"
    return Finding("memory", True, fact)


def _huge_pages(root: Path) -> Finding:
    try:
        chosen = re.search(r"\[(\w+)\]", (root / _THP).read_text())
    except OSError:
        chosen = None
    if chosen is None:
        return Finding("huge_pages", False, "this kernel has none")
    if chosen[1] == "never":
        hint = f"echo madvise | sudo tee /{_THP}"
        return Finding("huge_pages", False, "never: experts are read from small pages", hint)
    return Finding("huge_pages", True, chosen[1])


def _existing(folder: Path) -> Path:
    """Return the folder or its nearest parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _folders(settings: Settings) -> list[Path]:
    return [_existing(folder) for folder in (settings.models, *settings.more_homes)]


def _disk_space(settings: Settings) -> Finding:
    free = [shutil.disk_usage(folder).free for folder in _folders(settings)]
    return Finding("disk_space", True, " + ".join(map(format_bytes, free)) + " free for models")


def _direct_io(settings: Settings) -> Finding:
    """Write a page past the page cache where models are, and read it back."""
    if not hasattr(os, "preadv"):  # Windows, where no model runs
        return Finding("direct_io", False, "moeinf has none on this system")
    hint = "MOEINF_HOME=/a/folder/on/ext4/or/xfs"
    for folder in _folders(settings):
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
                file.write(bytes(PAGE_BYTES))
                file.flush()
                direct = is_direct(Path(file.name))
        except OSError as error:
            own = "MOEINF_HOME=/a/folder/that/you/own"
            return Finding("direct_io", False, f"not known: {error.strerror}", own)
        if not direct:
            fact = "refused by the models' file system: reads go through the page cache"
            return Finding("direct_io", False, fact, hint)
    return Finding("direct_io", True, "O_DIRECT works where models are")


def _disk_speed(settings: Settings) -> Finding:
    drive = remembered_drive(settings, settings.models, *settings.more_homes)
    if drive is None:
        return Finding("disk_speed", False, "not measured yet", "moeinf devices")
    speed = f"{drive.reading.bytes_per_s / 1e9:.2f} GB/s with {drive}"
    return Finding("disk_speed", True, speed, "" if drive.thorough else "moeinf devices")


def _read_ahead(settings: Settings, root: Path) -> Finding:
    """Read the read-ahead of the drives' block devices; a partition has that of its whole drive."""
    if not hasattr(os, "major"):  # Windows
        return Finding("read_ahead", True, "not known on this system")
    found = []
    for folder in _folders(settings):
        device = folder.stat().st_dev
        name = f"{os.major(device)}:{os.minor(device)}"
        place = root / "sys/dev/block" / name
        for queue in (place / "queue", place.resolve().parent / "queue"):
            with suppress(OSError, ValueError):
                found.append((int((queue / "read_ahead_kb").read_text()), queue.resolve()))
                break
        else:
            return Finding("read_ahead", True, "not known: the file system has no drive of its own")
    fact = ", ".join(f"{kb} KiB" for kb, _ in found)
    for kb, queue in found:
        if kb < LEAST_READ_AHEAD_KB:
            hint = f"echo {LEAST_READ_AHEAD_KB} | sudo tee {queue}/read_ahead_kb"
            return Finding("read_ahead", False, f"{fact}: loads through the page cache wait", hint)
    return Finding("read_ahead", True, fact)


def _file_system(settings: Settings, root: Path) -> Finding:
    """Look whether the home's locks hold: network_home.py says why they may not."""
    kind = network_type(settings.home, root / "proc/self/mountinfo")
    if not kind:
        return Finding("file_system", True, "local")
    fact = f"{kind}: only one machine at a time may write to MOEINF_HOME {settings.home}"
    return Finding("file_system", False, fact, "export MOEINF_HOME=FOLDER_ON_A_LOCAL_DRIVE")
