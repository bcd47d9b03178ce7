"""Whether --device-memory is kept: what this process holds of a GPU, looked at after every request.

Does not know slots. Arena and torch's part are allocated by us; what CUDA takes by itself, for its
context and for the code of kernels, is counted beforehand (device_plan.py) and seen only here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moeinf.native import DeviceContext
from moeinf.runtime.device_plan import DevicePlacement
from moeinf.runtime.held import HeldMemory


@dataclass(frozen=True)
class Held:
    """At most, so far. measured: by NVML, CUDA's own part included, which is assumed otherwise."""

    peak_bytes: int
    measured: bool


class Promise:
    """Of one engine."""

    def __init__(
        self,
        placement: DevicePlacement,
        held: HeldMemory,
        context: DeviceContext,
        torch_bytes: Callable[[], int],
    ) -> None:
        """torch_bytes: what torch has taken of the device. From before anything is allocated."""
        self._held, self._context, self._torch_bytes = held, context, torch_bytes
        self._counted = self._assumed = placement.context_bytes
        self._free, self._most = context.memory()[0], 0

    def look(self) -> Held:
        """What the process holds, other engines of it included."""
        if self._held.now_bytes() is not None:
            return Held(self._held.peak_bytes, True)
        self._most = max(self._most, self._free - self._context.memory()[0])
        return Held(self._assumed + self._most, False)

    def excess_bytes(self) -> int:
        """What CUDA takes by itself beyond what was counted for it; from now on it is counted.

        0 where NVML does not tell processes apart: another one's memory is not ours to save.
        """
        self.look()
        held = self._held.of_process_bytes()
        if held is None:
            return 0
        own = held - self._context.allocated_bytes - self._torch_bytes()
        excess = max(0, own - self._counted)
        self._counted += excess
        return excess
