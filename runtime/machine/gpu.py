"""The GPU of this machine: whether there is one, its memory, and torch's way to compute on it.

Importing it imports no torch: `find_gpu` asks the driver, and looks for torch's parts without
loading them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from moeinf.errors import reason
from moeinf.native import (
    DRIVER_LIBRARY,
    DeviceContext,
    DeviceError,
    Driver,
    NoDriver,
    OutOfDeviceMemory,
)
from moeinf.runtime.sizes import format_bytes

_LEAST_CAPABILITY = (8, 0)  # bfloat16, and asynchronous copies to shared memory
_LEAST_CONTEXT_BYTES = 16 << 20  # less is not a whole context
_FAULTS = ("CUDA error: ", "CUDA driver error: ", "Triton Error [CUDA]: ")  # first: cuBLAS too
_MISTAKE = "device-side assert"  # for example an index out of range: our fault, not the device's
_SCARCE = ("out of memory", "ALLOC_FAILED")  # of those: allocations that torch does not make itself
_TRITONS = ("OutOfResources", "PTXASError")  # not RuntimeErrors

if TYPE_CHECKING:
    from moeinf.offload.gpu_tier.arithmetic import Device
    from moeinf.runtime.dense.gpu_backend import DeviceMath
    from moeinf.runtime.machine.nvml import HeldMemory

    class TorchDevice(Device, DeviceMath, Protocol):
        """The arithmetic on a GPU: experts in slots, and dense weights."""


@dataclass(frozen=True)
class Gpu:
    """The driver's facts of one GPU. free_bytes: unclaimed memory, without our context.

    library: the libcuda that was asked. context_bytes: of our context, before anything computes;
    None: unknown.
    """

    name: str
    total_bytes: int
    free_bytes: int
    driver_version: int
    library: str
    context_bytes: int | None = None

    def __str__(self) -> str:
        free, total = format_bytes(self.free_bytes), format_bytes(self.total_bytes)
        return f"{self.name}, {free} of {total} free"


@dataclass(frozen=True)
class NoGpu:
    """The reason why no GPU can be used, in words. driver: False if there is no libcuda."""

    why: str
    driver: bool = True


def is_there(library: str | None = None) -> str | NoGpu:
    """Return the first GPU's name; unlike find_gpu it takes none of its memory."""
    try:
        return _driver(library or DRIVER_LIBRARY).info(0)[0]
    except (NoDriver, DeviceError) as error:
        return NoGpu(str(error), driver=not isinstance(error, NoDriver))


def all_gpus(library: str | None = None) -> list[tuple[str, int]] | NoGpu:
    """Return name and bytes of memory of each GPU; the first is the one that is used."""
    try:
        driver = _driver(library or DRIVER_LIBRARY)
        return [driver.info(number)[:2] for number in range(driver.devices)]
    except (NoDriver, DeviceError) as error:
        return NoGpu(str(error))


def find_gpu(library: str | None = None) -> Gpu | NoGpu:
    """Return the first GPU. Its free memory is read again at every call."""
    name = library or DRIVER_LIBRARY
    try:
        driver = _driver(name)
        opened = _opened(name)
        free, total = opened.context.memory()
        return Gpu(driver.info(0)[0], total, free, driver.version, name, opened.size_bytes)
    except (NoDriver, DeviceError) as error:
        return NoGpu(str(error))


def open_context(gpu: Gpu) -> DeviceContext:
    """Return the primary context of its device. Raises DeviceError."""
    return _opened(gpu.library).context


def held_memory(gpu: Gpu) -> HeldMemory:
    """Return the meter of all memory that this process holds there. Raises DeviceError."""
    return _opened(gpu.library).held


def missing_for_kernels() -> str | None:
    """Return the reason why this installation cannot compute on a GPU that is there, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (a torch with CUDA includes it)"
    if (fault := torch_fault()) is not None:
        return fault
    import torch  # noqa: PLC0415 - `plan` and `doctor` do without it

    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return "this torch does not support it"
        return f"its driver cannot run CUDA {torch.version.cuda}, which this torch needs"
    major, minor = torch.cuda.get_device_capability(0)
    if (major, minor) < _LEAST_CAPABILITY:
        return f"its compute capability is {major}.{minor}, and the kernels need 8.0 (Ampere)"
    fault = triton_fault()
    if fault is None:
        _kernels()  # `serve` has imported them before it listens
    return fault


def torch_fault() -> str | None:
    """Return the reason why torch cannot be imported here, or None."""
    try:
        import torch  # noqa: F401, PLC0415 - `doctor` tells what breaks it
    except Exception as error:  # of its libraries, files, imports
        return f"torch cannot be imported: {reason(error).splitlines()[0]}"
    return None


def triton_fault() -> str | None:
    """Return the reason why Triton cannot start a kernel here, or None.

    The first time, Triton builds a small library with the system's C compiler and Python's
    headers.
    """
    try:
        from triton.runtime import driver  # noqa: PLC0415 - optional

        driver.active.utils  # noqa: B018
    except Exception as error:  # of subprocesses, files, imports
        return f"Triton cannot start kernels: {str(error).splitlines()[0]}"
    return None


@contextmanager
def device_faults() -> Iterator[None]:
    """Raise errors of torch and Triton from a failed device as DeviceError.

    A device out of memory for code, libraries or graphs raises OutOfDeviceMemory. (torch has its
    own class for its own allocations.)
    """
    try:
        yield
    except Exception as error:
        if not _of_device(error):
            raise
        words = str(error).splitlines()[0]
        scarce = any(some in words for some in _SCARCE)
        fault = (OutOfDeviceMemory if scarce else DeviceError)(words)
        fault.name, fault.call = type(error).__name__, "torch"
        raise fault from error


def _of_device(error: Exception) -> bool:
    if type(error).__module__.startswith("triton."):
        return type(error).__name__ in _TRITONS
    if isinstance(error, DeviceError) or not isinstance(error, RuntimeError):
        return False
    return str(error).startswith(_FAULTS) and _MISTAKE not in str(error)


def torch_device(any_torch: bool = False) -> TorchDevice:
    """Return torch's CUDA device with our kernels. missing_for_kernels() must return None.

    any_torch: CUDA graphs with an older torch, too.
    """
    return _kernels()(any_torch)


def _kernels() -> Callable[[bool], TorchDevice]:
    from moeinf.offload.gpu_kernels.device import CudaDevice  # noqa: PLC0415 - imports Triton

    return CudaDevice


@cache
def _driver(library: str) -> Driver:
    return Driver(library)


class _Opened(NamedTuple):
    context: DeviceContext
    held: HeldMemory
    size_bytes: int | None  # of the context


@cache
def _opened(library: str) -> _Opened:
    """Open the driver and context, once until the process ends.

    That takes a good part of a second.
    """
    from moeinf.runtime.machine.nvml import HeldMemory  # noqa: PLC0415 - imports pynvml

    driver = _driver(library)
    held = HeldMemory(driver.info(0)[2])
    context = DeviceContext(driver)
    return _Opened(context, held, held.now_bytes(_LEAST_CONTEXT_BYTES))
