"""Choose the processor of the routed experts. No other module decides this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moeinf.errors import DeviceError, Unavailable
from moeinf.runtime.config import Wanted
from moeinf.runtime.machine import gpu as gpus
from moeinf.runtime.machine.gpu import Gpu, NoGpu, find_gpu, is_there
from moeinf.runtime.sizes import MemorySize


class DeviceUnavailable(Unavailable, ValueError):
    """A requested processor or its memory is missing."""

    code = "device_unavailable"
    hint = "--device cpu, without --device-memory"
    serve_hint = DeviceError.serve_hint


class DeviceNotChosen(DeviceUnavailable):
    """--device-memory was given without --device cuda."""

    code = "device_not_chosen"
    hint = "--device cuda with it, or no --device-memory"


class NoKernels(DeviceUnavailable):
    """There is a GPU, but this installation cannot use it."""

    code = "no_kernels"
    hint = (
        "--device cpu. A GPU needs torch with CUDA (`pip install --force-reinstall torch`), "
        "Triton (`pip install '.[gpu]'` in the clone) with a C compiler, and Ampere or later"
    )
    serve_hint = "this installation lacks what `moeinf plan MODEL --device cuda` names"


@dataclass(frozen=True)
class Processor:
    """The processor of routed experts, and the reason for the choice. gpu: set if it is cuda."""

    name: Literal["cpu", "cuda"]
    why: str
    gpu: Gpu | None = None

    def __str__(self) -> str:
        return f"device: {self.name} ({self.why})"


def choose_processor(
    wanted: Wanted, device_memory: MemorySize | None, library: str | None = None
) -> Processor:
    """Choose the processor; `auto` is always the CPU. Raises DeviceUnavailable.

    library: the path of libcuda; None searches the system.
    """
    if wanted == "cuda":
        found = find_gpu(library)
        if isinstance(found, NoGpu):
            raise DeviceUnavailable(f"--device cuda: {found.why}")
        return Processor("cuda", f"asked for: {found}", found)
    if device_memory is not None:
        if wanted == "auto" and not isinstance(is_there(library), NoGpu):
            raise DeviceNotChosen("--device-memory needs --device cuda: a GPU is not the default")
        raise DeviceUnavailable("--device-memory needs a GPU, and none is used")
    if wanted == "cpu":
        return Processor("cpu", "asked for")
    name = is_there(library)
    if isinstance(name, NoGpu):
        return Processor("cpu", f"no GPU: {name.why if name.driver else 'there is no driver'}")
    return Processor("cpu", f"--device cuda would use {name}, which is not chosen by itself yet")


def why_unusable(gpu: str) -> str | None:
    """Return why this installation cannot compute on the GPU `gpu`, or None if it can.

    Imports torch.
    """
    missing = gpus.missing_for_kernels()
    return None if missing is None else f"{gpu} cannot be used: {missing}"


def check_usable(gpu: str) -> None:
    """Raise NoKernels if this installation cannot compute on the GPU `gpu`."""
    why = why_unusable(gpu)
    if why is not None:
        raise NoKernels(f"--device cuda: {why}")
