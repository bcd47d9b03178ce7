"""Which processor computes the routed experts, and why: the one place that decides it.

Does not know how any of them computes, nor how much goes where (plan.py, device_plan.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from moeinf.runtime.gpu import Gpu, NoGpu, find_gpu, is_there
from moeinf.runtime.sizes import MemorySize

Wanted = Literal["auto", "cpu", "gpu"]
WANTED: tuple[Wanted, ...] = get_args(Wanted)


class DeviceUnavailable(ValueError):
    """A processor was asked for, or memory of one, that is not there."""


@dataclass(frozen=True)
class Processor:
    """Where routed experts are computed, and one line on why. gpu: where that is one."""

    name: Literal["cpu", "gpu"]
    why: str
    gpu: Gpu | None = None

    def __str__(self) -> str:
        return f"device: {self.name} ({self.why})"


def choose_processor(
    wanted: Wanted, device_memory: MemorySize | None, library: str | None = None
) -> Processor:
    """`auto` is the CPU: no GPU has been measured with this moeinf yet. Raises DeviceUnavailable.

    library: where libcuda is, if not where the system finds it.
    """
    if wanted == "gpu":
        found = find_gpu(library)
        if isinstance(found, NoGpu):
            raise DeviceUnavailable(f"--device gpu: {found.why}")
        return Processor("gpu", f"asked for: {found}", found)
    if device_memory is not None:
        raise DeviceUnavailable("there is no device whose memory --device-memory could limit")
    if wanted == "cpu":
        return Processor("cpu", "asked for")
    name = is_there(library)
    if isinstance(name, NoGpu):
        return Processor("cpu", f"there is no GPU: {name.why}")
    return Processor("cpu", f"--device gpu would use {name}, which is not chosen by itself yet")
