"""Which processor computes: the one place that knows which there are.

Does not know how any of them computes. Another tier, say a GPU, begins here: it says that it is
there, what it may hold, and why it was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from moeinf.runtime.sizes import MemorySize

Wanted = Literal["auto", "cpu", "cuda"]
WANTED: tuple[Wanted, ...] = get_args(Wanted)


class DeviceUnavailable(ValueError):
    """A processor was asked for, or memory of one, that this moeinf cannot use."""


@dataclass(frozen=True)
class Processor:
    """Where a model computes, and one line on why."""

    name: Literal["cpu"]
    why: str

    def __str__(self) -> str:
        return f"device: {self.name} ({self.why})"


def choose_processor(wanted: Wanted, device_memory: MemorySize | None) -> Processor:
    """Raises DeviceUnavailable."""
    if wanted == "cuda":
        raise DeviceUnavailable("this moeinf computes on the CPU only, not on cuda")
    if device_memory is not None:
        raise DeviceUnavailable("there is no device whose memory --device-memory could limit")
    why = "asked for" if wanted == "cpu" else "this moeinf has no kernels for a GPU yet"
    return Processor("cpu", why)
