"""Kills a pull (or fills the disk) at every write, fsync, rename and unlink; looks at what is left.

Run: python scripts/kill_points.py [--hub] [--full] [--every 1]
For K = 1, 2, … a pull is killed (SIGKILL) at its K-th such call; a write gets through by half. Then
the model must be absent or complete, never half; a rerun must complete it with the same files and
leave nothing else behind. Prints the points and the outcomes; exits 1 when anything is wrong. Each
pull runs in a forked child.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import moeinf.runtime.durable as durable
import moeinf.runtime.workplace as workplace_module
from moeinf.runtime.checkpoint import open_checkpoint
from moeinf.runtime.config import Settings
from moeinf.runtime.hub import HubSource, look_up
from moeinf.runtime.library import Library
from moeinf.runtime.manifest import read_manifest
from moeinf.runtime.names import ModelName
from moeinf.runtime.repack import LocalSource, Source, repack
from moeinf.runtime.verify import verify
from moeinf.runtime.workplace import downloads_of
from scripts.make_checkpoint import config, make_checkpoint
from tests.hub_server import Hub, serve

NAME = ModelName("victim", "bf16")
FULL = 28  # exit code of a child that met a full disk, and said so
_FREEING = (os.unlink,)  # these never fail for want of room
POINTS = ("write", "pwrite", "fsync", "rename", "replace", "unlink")


def ignore(*_: object) -> None:
    """No progress, no notes."""


class Killer:
    """Counts the calls that change the disk, and dies at the K-th."""

    def __init__(self, at: int | None, full: bool) -> None:
        self.at, self.full, self.count = at, full, 0

    def install(self) -> None:
        for name in POINTS:
            setattr(os, name, self._wrap(getattr(os, name), name.endswith("write")))
        durable.syncfs = self._wrap(durable.syncfs, False)  # type: ignore[attr-defined]
        workplace_module.sync_filesystem = durable.sync_filesystem  # type: ignore[attr-defined]

    def _wrap(self, call: Callable[..., Any], writes: bool) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            hit = self.count == self.at
            if hit and writes:
                half = memoryview(arguments[1])[: len(arguments[1]) // 2]
                call(arguments[0], half, *arguments[2:])
            if hit and not self.full:
                os.kill(os.getpid(), signal.SIGKILL)
            if hit and call not in _FREEING:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*arguments, **options)

        return counted


def pull(
    home: Path, make_source: Callable[[Library], Source], at: int | None, full: bool = False
) -> tuple[int, int]:
    """Pulls in a child; returns its wait status and how many points it passed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        killer, code = Killer(at, full), 1
        try:
            library = Library(Settings(home))
            source = make_source(library)
            report = os.write
            killer.install()
            repack(source, library, NAME, ignore, ignore)
            report(writing, str(killer.count).encode())
            code = 0
        except BaseException as error:
            if getattr(error, "errno", None) == errno.ENOSPC and full:
                code = FULL
            else:
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
        finally:
            os._exit(code)
    os.close(writing)
    count = os.read(reading, 64)
    os.close(reading)
    return os.waitpid(child, 0)[1], int(count or 0)


def state(home: Path) -> tuple[str, dict[str, str]]:
    """absent, complete or HALF, and the hashes of a complete model."""
    library = Library(Settings(home))
    if not library.has(NAME):
        return "absent", {}
    manifest = read_manifest(library.folder(NAME))
    broken = verify(library.folder(NAME), manifest, ignore)
    return ("HALF" if broken else "complete"), {f.path: f.sha256 for f in manifest.files}


def strangers(home: Path, shas: dict[str, str]) -> list[str]:
    """Files in the models' folder that no manifest names."""
    known = {str(Path(NAME.name) / NAME.tag / path) for path in (*shas, "manifest.json")}
    models = home / "models"
    found = (str(p.relative_to(models)) for p in models.rglob("*") if p.is_file())
    return sorted(path for path in found if path not in known)


def with_hub(checkpoint: Path, every: int, full: bool) -> int:
    """Serves the checkpoint and runs this script again, in a process that knows it from birth."""
    with serve(Hub("org/victim", checkpoint)) as hub:
        again = [sys.executable, __file__, "--every", str(every), "--served", str(checkpoint)]
        again += ["--full"] if full else []
        environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0"}
        return subprocess.run(again, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hub", action="store_true", help="pull from the stand-in for the hub")
    parser.add_argument("--every", type=int, default=1, help="try only every N-th point")
    parser.add_argument("--full", action="store_true", help="the disk is full there, instead")
    parser.add_argument("--served", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moeinf-kill-") as folder:
        place = Path(folder)
        if options.served is not None:
            return try_all(place, options.served, options.every, options.full, hub=True)
        # Three files; most experts straddle two of them.
        make_checkpoint(place / "checkpoint", config(2, 3, 64, 48, 2), file_bytes=60_000)
        if options.hub:
            return with_hub(place / "checkpoint", options.every, options.full)
        return try_all(place, place / "checkpoint", options.every, options.full, hub=False)


def try_all(place: Path, checkpoint: Path, every: int, full: bool, *, hub: bool) -> int:
    """Kills at every point, prints what came of it, and returns the exit code."""

    def local(_library: Library) -> Source:
        return LocalSource(open_checkpoint(checkpoint), str(checkpoint))

    def remote(library: Library) -> Source:
        repository = look_up("org/victim", None, None)
        return HubSource(repository, downloads_of(library.folder(NAME)), None, 2)

    source, wrong = (remote if hub else local), []
    status, points = pull(place / "whole", source, None)
    kind, shas = state(place / "whole")
    assert (status, kind) == (0, "complete"), (status, kind)
    outcomes: Counter[str] = Counter()
    for at in range(1, points + 1, every):
        home = place / "home"
        shutil.rmtree(home, ignore_errors=True)
        status, _ = pull(home, source, at, full)
        kind, found = state(home)
        met = (FULL << 8) if full else signal.SIGKILL
        outcomes[kind if status == met else f"unharmed {kind}"] += 1
        if kind == "HALF" or (found and found != shas):
            wrong.append(f"point {at}: {kind} after the kill")
        status, _ = pull(home, source, None)
        kind, found = state(home)
        left = strangers(home, found)
        if status != 0 or kind != "complete" or found != shas or left:
            other = sorted(set(found.items()) ^ set(shas.items()))
            wrong.append(f"point {at}: rerun ended with {status}, {kind}, left {left}, {other}")
    where = "from the hub" if hub else "from a folder"
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    what = "disk full" if full else "killed"
    print(f"pull {where}: {points} points, {what} at every {every}: {told}")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
