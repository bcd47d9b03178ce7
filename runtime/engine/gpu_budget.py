"""Whether --device-memory is kept: what this process holds of a GPU, looked at after every request.

Does not know slots. Arena and torch's part are allocated by us; what CUDA takes by itself, for its
context and for the code of kernels, is counted beforehand (gpu_plan.py) and seen only here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moeinf.native import DeviceContext
from moeinf.runtime.machine.nvml import HeldMemory
from moeinf.runtime.placement.gpu_plan import DevicePlacement

_MARGIN_BYTES = 32 << 20  # for the next graphs and kernels of CUDA's


@dataclass(frozen=True)
class Held:
    """At most, so far. measured: by NVML, CUDA's own part included, which is assumed otherwise."""

    peak_bytes: int
    measured: bool


@dataclass(frozen=True)
class Excess:
    """What CUDA takes by itself beyond what was counted for it: of_torch_bytes of it torch may not
    have any more, and for beyond_bytes of these experts have to give slots."""

    size_bytes: int
    of_torch_bytes: int
    beyond_bytes: int


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
        self._spare = placement.budget_bytes - placement.peak_bytes
        self._kept = 0  # given up, and not taken by CUDA yet
        self.margin_bytes = min(_MARGIN_BYTES, placement.arena_bytes // 16)
        self._free, self._most = context.memory()[0], 0

    def look(self) -> Held:
        """What the process holds, other engines of it included."""
        now = self._held.now_bytes(self._allocated)
        taken = self._assumed + self._free - self._context.memory()[0]
        self._most = max(self._most, taken if now is None else now)
        return Held(self._most, now is not None)

    def excess(self) -> Excess:
        """From now on it is counted.

        None of it where NVML does not tell processes apart: another one's memory is not ours to
        save.
        """
        self.look()
        allocated = self._allocated
        held = self._held.of_process_bytes(allocated)
        own = 0 if held is None else held - allocated
        excess = max(0, own - self._counted)
        self._counted += excess
        left = max(0, excess - self._kept)
        self._kept -= excess - left
        beyond = max(0, left - self._spare)
        self._spare -= left - beyond
        return Excess(excess, left, beyond)

    def keep(self, size_bytes: int) -> None:
        """So much more was given up than CUDA takes now: giving up slots evicts everybody."""
        self._kept += size_bytes

    @property
    def _allocated(self) -> int:
        """By us, and through torch; never 0, which NVML says of what it does not know."""
        return max(1, self._context.allocated_bytes + self._torch_bytes())
