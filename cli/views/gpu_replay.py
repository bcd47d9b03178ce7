"""Parse the GPU options of `moeinf simulate`, and report its results with a GPU tier.

Without --device-capacity there is no GPU tier, and nothing is reported about it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeinf.cli.errors import Usage
from moeinf.offload.gpu_tier.miss_split import MISSES
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.sizes import parse_size

if TYPE_CHECKING:
    from moeinf.offload.simulator.cases import OnDevice
    from moeinf.offload.simulator.outcome import Outcome


def _speed(text: str) -> int:
    try:
        speed = parse_size(text.removesuffix("/s"))
    except InvalidValue as error:
        raise typer.BadParameter(str(error)) from error
    if speed == 0:
        raise typer.BadParameter("the speed must be above 0")
    return speed


def _option(words: str) -> Any:
    return typer.Option(parser=_speed, metavar="SIZE", help=words, show_default=False)


DeviceShares = Annotated[
    str | None,
    typer.Option(
        metavar="5%,10%", help="Shares of all experts in a device's memory.", show_default=False
    ),
]
Misses = Annotated[
    str | None,
    typer.Option(
        metavar=",".join(MISSES),
        help="Compute an expert that the device lacks on the CPU, or fetch it. Default: auto.",
        show_default=False,
    ),
]
BusSpeed = Annotated[int | None, _option("Bytes a second to the device. Default: 25GB.")]
CpuSpeed = Annotated[int | None, _option("Bytes a second that the CPU computes. Default: 30GB.")]
DeviceSpeed = Annotated[int | None, _option("Bytes a second of device memory. Default: 500GB.")]


@dataclass(frozen=True)
class DeviceOptions:
    """The options as typed; None for one that was not given."""

    device_capacity: str | None
    miss: str | None
    bus_speed: int | None
    cpu_speed: int | None
    device_speed: int | None

    def devices(self, late: bool) -> list[OnDevice | None]:
        """Return every device to replay; [None] means no device. Raises Usage."""
        if self.device_capacity is None:
            for option in fields(self):
                if getattr(self, option.name) is not None:
                    flag = option.name.replace("_", "-")
                    raise Usage(f"--{flag} needs --device-capacity, for example 10%")
            return [None]
        if late:
            raise Usage("--late and --device-capacity cannot be combined")
        from moeinf.offload.simulator.cases import OnDevice
        from moeinf.offload.simulator.clock import DeviceSpeeds

        known = {"bus": self.bus_speed, "cpu": self.cpu_speed, "device": self.device_speed}
        speeds = DeviceSpeeds(
            **{f"{name}_bytes_per_s": float(speed) for name, speed in known.items() if speed}
        )
        shares, wanted = expert_shares(self.device_capacity), (self.miss or "auto").split(",")
        misses = [miss for name in wanted for miss in MISSES if miss == name.strip()]
        if len(misses) < len(wanted):
            raise Usage(f"--miss: {self.miss!r} is invalid (expected {', '.join(MISSES)})")
        return [OnDevice(share, miss, speeds) for share in shares for miss in misses]


def expert_shares(text: str) -> list[float]:
    """Parse `5%,10%` into fractions. Raises Usage."""
    shares = []
    for part in text.split(","):
        try:
            shares.append(float(part.strip().removesuffix("%")) / 100)
        except ValueError:
            shares.append(-1)
        if not 0 < shares[-1] <= 1:
            raise Usage(f"{part!r} is invalid (expected a share of the experts such as 10%)")
    return shares


def device_result(device: OnDevice, outcome: Outcome) -> dict[str, Any]:
    """Return the fields that a device adds to a result of --json."""
    return {
        "device_capacity": device.share,
        "miss": device.miss,
        "device_hit_rate": round(outcome.device_hit_rate, 5),
        "host_hit_rate": round(outcome.host_hit_rate, 5),
        "cpu_share": round(outcome.cpu_share, 5),
        "bus_bytes_per_token": round(outcome.bus_bytes_per_token),
        "ms_per_token": outcome.ms_per_token,
        "floor_ms_per_token": outcome.floor_ms_per_token,
    }


def device_model(device: OnDevice) -> dict[str, Any]:
    """Return the fields that a device adds to the time model of --json."""
    return {**asdict(device.speeds), "fetched_share": round(device.speeds.fetched_share, 5)}
