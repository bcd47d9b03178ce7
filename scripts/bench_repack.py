"""How fast a checkpoint is repacked, beside what copying it takes on the same disk in the same run.

Run: python scripts/bench_repack.py [--gigabytes 6] [--rounds 3] [--folder .]
Each round, in turn: `cp` of the checkpoint's files and a sync of the disk, and `moeinf pull` of it,
as processes of their own, with the page cache of the checkpoint dropped before each. Prints bytes
per second of both and the ratio, round by round, and the median ratio.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.make_checkpoint import config, make_checkpoint

MOEINF = [sys.executable, "-c", "from moeinf.cli.entry import main; main()"]


def forget(folder: Path) -> None:
    """Drops the files of a folder from the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(command: list[str], environment: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, env=environment, check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        source, copy, home = (Path(place).absolute() / name for name in ("source", "copy", "home"))
        layers = max(1, round(options.gigabytes * 1e9 / 839e6))
        size = make_checkpoint(source, config(layers, 64, 2048, 1024, 8))
        environment = {**os.environ, "MOEINF_HOME": str(home)}
        both = f'cp -r "{source}" "{copy}" && sync -f "{copy}"'
        ratios = []
        for number in range(options.rounds):
            forget(source)
            by_cp = size / timed(["sh", "-c", both], environment)
            shutil.rmtree(copy)
            forget(source)
            pull = [*MOEINF, "pull", str(source), "--name", "bench", "--quiet"]
            by_pull = size / timed(pull, environment)
            shutil.rmtree(home)
            ratios.append(by_pull / by_cp)
            speeds = f"cp {by_cp / 1e6:.0f} MB/s, pull {by_pull / 1e6:.0f} MB/s"
            print(f"round {number + 1}: {speeds}, ratio {ratios[-1]:.2f}", flush=True)
        print(f"{size} bytes, median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
