"""Compare other ways to divide and keep experts with a device, on recordings.

Run: python -m scripts.study_tiers tests/data/traces/*.csv.gz
The policy is `adaptive`, misses are `auto`. Each way is the replay with one thing changed. The
engine has none of them; see docs/decisions/0040.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from moeinf.offload.policy.table import POLICIES
from moeinf.offload.routing.route_csv import read_route_csv
from moeinf.offload.simulator.clock import DeviceSpeeds, TimeModel
from moeinf.offload.simulator.replay import Conditions
from moeinf.offload.simulator.simulated_device import Above
from moeinf.offload.simulator.tiered_replay import TieredReplay

NO_DISK = TimeModel(ram_over_link=0.01)  # as if the disk took no time
SPEEDS = (DeviceSpeeds(), DeviceSpeeds(25e9, 10e9), DeviceSpeeds(12e9, 60e9))


class NoPromotion(TieredReplay):
    """Replay without promotion: CPU-computed experts stay in the host tier; only fetches go up."""

    def _promote(self, now: float) -> None:
        self._promotable = []


class NoBacklog(TieredReplay):
    """`auto` fetches the same share, regardless of the bus queue."""

    def _divide(self, cells: Sequence[int], now: float) -> tuple[list[int], list[int]]:
        few = sorted(cells, key=lambda cell: not self._device.policy.keeps(cell))
        count = self._split.fetched(len(few))
        return few[:count], few[count:]


class ExactBacklog(TieredReplay):
    """`auto` uses the exact time when the bus becomes free."""

    def _divide(self, cells: Sequence[int], now: float) -> tuple[list[int], list[int]]:
        device, most = self._device, len(cells)
        behind = max(0.0, device.free_at - now)
        few = sorted(cells, key=lambda cell: not device.policy.keeps(cell))

        def ends(fetched: int) -> float:
            bus = behind + fetched * device.copy_seconds if fetched else 0.0
            return max(bus, (most - fetched) * self._on_cpu)

        count = min(range(most + 1), key=ends)
        return few[:count], few[count:]


class Exclusive(TieredReplay):
    """The host first evicts experts that are also on the device."""

    def _make_room(self) -> bool:
        if not self._host.free:
            twice = self._policy.victim(
                lambda cell: self._host.can_evict(cell) and self._device.has(cell)
            )
            if twice is not None:
                self._host.evict(twice)
                self._ahead.discard(twice)
        return super()._make_room()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+")
    for path in parser.parse_args().traces:
        recording = read_route_csv(path)
        cells = recording.shape.layers * recording.shape.experts

        def show(
            device: float, host: float, time: TimeModel, speeds: DeviceSpeeds,
            *ways: type[TieredReplay], recording=recording, cells=cells,
        ) -> None:  # fmt: skip
            found = []
            for way in ways:
                above = Above(round(device * cells), "auto", speeds)
                conditions = Conditions(round(host * cells), time)
                outcome = way(recording, POLICIES["adaptive"], conditions, above).run()
                mega = outcome.bytes_read_per_token / 1e6
                found.append(
                    f"{way.__name__} {outcome.ms_per_token:.2f} ms, "
                    f"{outcome.device_hit_rate:.1%} on the device, {mega:.1f} MB read"
                )
            bus, cpu = speeds.bus_bytes_per_s / 1e9, speeds.cpu_bytes_per_s / 1e9
            print(f"  device {device:.0%}, host {host:.0%}, bus {bus:.0f}, CPU {cpu:.0f} GB/s:")
            print("    " + "\n    ".join(found))

        print(recording.name)
        for device in (0.14, 0.36):
            for speeds in SPEEDS:
                show(device, 1, NO_DISK, speeds, TieredReplay, NoBacklog, ExactBacklog, NoPromotion)
            for host in (0.1, 0.2, 0.4):
                show(device, host, TimeModel(), SPEEDS[0], TieredReplay, Exclusive)


if __name__ == "__main__":
    main()
