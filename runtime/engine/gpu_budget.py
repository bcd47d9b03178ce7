"""Check --device-memory after every request: how much of a GPU this process holds.

Arena and torch's part are allocated by us. CUDA's own part, for its context and for the code of
kernels, is counted beforehand (gpu_plan.py) and measured only here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moeinf.native import DeviceContext
from moeinf.runtime.machine.nvml import HeldMemory
from moeinf.runtime.placement.gpu_plan import DevicePlacement

_MARGIN_BYTES = 32 << 20  # for CUDA's next graphs and kernels


@dataclass(frozen=True)
class Held:
    """The peak so far. measured: by NVML, CUDA's own part included, which is assumed otherwise."""

    peak_bytes: int
    measured: bool


@dataclass(frozen=True)
class Excess:
    """The memory that CUDA itself takes beyond its count.

    Torch loses of_torch_bytes of it. Experts give slots for beyond_bytes of these.
    """

    size_bytes: int
    of_torch_bytes: int
    beyond_bytes: int


class Promise:
    """The device memory that one engine may hold."""

    def __init__(
        self,
        placement: DevicePlacement,
        held: HeldMemory,
        context: DeviceContext,
        torch_bytes: Callable[[], int],
    ) -> None:
        """Start to watch, before anything is allocated. torch_bytes: torch's reserved memory."""
        self._held, self._context, self._torch_bytes = held, context, torch_bytes
        self._counted = self._assumed = placement.context_bytes
        self._spare = placement.budget_bytes - placement.peak_bytes
        self._kept = 0  # given up, and not yet taken by CUDA
        self.margin_bytes = min(_MARGIN_BYTES, placement.arena_bytes // 16)
        self._free, self._most = context.memory()[0], 0

    def look(self) -> Held:
        """Return the memory that the process holds, other engines of it included."""
        now = self._held.now_bytes(self._allocated)
        taken = self._assumed + self._free - self._context.memory()[0]
        self._most = max(self._most, taken if now is None else now)
        return Held(self._most, now is not None)

    def excess(self) -> Excess:
        """Return the new excess, and count it.

        It is 0 where NVML does not tell processes apart: memory of another process cannot be given
        up here.
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
        """Note memory given up beyond CUDA's excess: giving up slots evicts all experts."""
        self._kept += size_bytes

    @property
    def _allocated(self) -> int:
        """Bytes allocated by us and torch; at least 1, because NVML reports 0 for unknown."""
        return max(1, self._context.allocated_bytes + self._torch_bytes())
