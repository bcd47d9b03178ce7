"""Compare the speed of repacking a checkpoint with copying it, on the same disk in the same run.

Run: python scripts/bench_repack.py [--gigabytes 6] [--rounds 3] [--folder .] [--tags q4,q8]
Each round runs `cp` of the checkpoint's files with a sync of the disk, then `moeinf pull` of it.
Both are processes of their own; the checkpoint's page cache is dropped before each. Prints bytes
per second of both and the ratio, round by round, and the median ratio. With --tags, a round also
pulls the checkpoint in those tags; their ratios are to the pull in bf16. All count source bytes.
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
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.make_checkpoint import config, make_checkpoint

MOEINF = [sys.executable, "-c", "from moeinf.cli.entry import main; main()"]


def forget(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
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
    parser.add_argument("--tags", default="", help="such as q4,q8: pulled besides bf16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        source, copy, home = (Path(place).absolute() / name for name in ("source", "copy", "home"))
        layers = max(1, round(options.gigabytes * 1e9 / 839e6))
        size = make_checkpoint(source, config(layers, 64, 2048, 1024, 8))
        environment = {**os.environ, "MOEINF_HOME": str(home)}
        both = f'cp -r "{source}" "{copy}" && sync -f "{copy}"'
        ratios: dict[str, list[float]] = defaultdict(list)

        def by_pull(tag: str) -> float:
            forget(source)
            pull = [*MOEINF, "pull", str(source), "--name", f"bench:{tag}", "--quiet"]
            speed = size / timed(pull, environment)
            shutil.rmtree(home)
            return speed

        for number in range(options.rounds):
            forget(source)
            by_cp = size / timed(["sh", "-c", both], environment)
            shutil.rmtree(copy)
            speeds = {"cp": by_cp, "bf16": by_pull("bf16")}
            ratios["bf16 / cp"].append(speeds["bf16"] / by_cp)
            for tag in filter(None, options.tags.split(",")):
                speeds[tag] = by_pull(tag)
                ratios[f"{tag} / bf16"].append(speeds[tag] / speeds["bf16"])
            said = ", ".join(f"{name} {speed / 1e6:.0f} MB/s" for name, speed in speeds.items())
            print(f"round {number + 1}: {said}", flush=True)
        medians = (f"{name} {statistics.median(found):.2f}" for name, found in ratios.items())
        print(f"{size} bytes, median ratios: {', '.join(medians)}")


if __name__ == "__main__":
    main()
