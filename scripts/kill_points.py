"""Kill a pull, cp or rm (or fill the disk) at every write, fsync, rename, link and unlink.

Run: python scripts/kill_points.py [--what pull|cp|rm] [--hub] [--gguf] [--full] [--every 1]
For K = 1, 2, … the action is killed (SIGKILL) at its K-th such call; half of a write succeeds. Then
every model must be absent or complete, never half, and a copy's origin complete. A rerun must reach
the state of the whole action, with the same files, and leave no other files. It must not write a
shard again that the journal calls finished. Prints the points and
the outcomes; exits with 1 when anything is wrong. Each action runs in a forked child.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

sys.path.insert(0, str(Path(__file__).parents[1]))

import moeinf.runtime.files.atomic as durable
import moeinf.runtime.library.repacking.repack as repack_module
import moeinf.runtime.library.staging as workplace_module
from moeinf.runtime.checkpoints.checkpoint import open_checkpoint
from moeinf.runtime.config import Settings
from moeinf.runtime.hub import base_repository
from moeinf.runtime.hub.listing import look_up
from moeinf.runtime.hub.repository import HubSource
from moeinf.runtime.hub.resolve import find_source
from moeinf.runtime.library.clone import ModelExists, copy_model
from moeinf.runtime.library.library import Library, NoSuchModel
from moeinf.runtime.library.manifest import read_manifest
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.library.sources import LocalSource, Source
from moeinf.runtime.library.staging import JOURNAL, downloads_of, partial_folder, read_lines
from moeinf.runtime.library.verify import verify
from moeinf.runtime.names import ModelName
from scripts.make_checkpoint import byte_tokenizer, config, make_checkpoint
from tests.gguf_files import matrices, write_gguf
from tests.hub_server import Hub, serve
from tests.shared_processes import tried_once, try_once

NAME = ModelName("victim", "bf16")
COPY = ModelName("second", "bf16")
_BF16 = matrices(GGMLQuantizationType.BF16)
FULL = 28  # exit code of a child that reported a full disk
_FREEING = (os.unlink, os.rmdir)  # these never fail on a full disk
POINTS = ("write", "pwrite", "fsync", "rename", "replace", "unlink", "link", "rmdir", "mkdir")
Action = Callable[[Settings], object]
Prepare = Callable[[Settings], Action]  # steps before the counted calls


def ignore(*_: object) -> None:
    """Ignore progress and notes."""


class Killer:
    """A counter of the calls that change the disk; it kills the process, or fails, at the K-th."""

    def __init__(self, at: int | None, full: bool) -> None:
        self.at, self.full, self.count = at, full, 0

    def install(self) -> None:
        for name in POINTS:
            call = ignore if name == "fsync" else getattr(os, name)
            setattr(os, name, self._wrap(call, name.endswith("write")))
        # A killed process loses no data of files, so nothing needs to reach the disk.
        durable.syncfs = self._wrap(ignore, False)  # type: ignore[attr-defined]
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


def act(home: Path, prepare: Prepare, at: int | None, full: bool = False) -> tuple[int, int]:
    """Act in a child; return its wait status and the number of points it passed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        killer, code = Killer(at, full), 1
        try:
            action = prepare(Settings(home))
            report = os.write
            killer.install()
            action(Settings(home))
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


def state(home: Path, name: ModelName = NAME) -> tuple[str, dict[str, str]]:
    """Return "absent", "complete" or "HALF", and the hashes of a complete model."""
    library = Library(Settings(home))
    if not library.has(name):
        return "absent", {}
    manifest = read_manifest(library.folder(name))
    broken = verify(library.folder(name), manifest, ignore)
    return ("HALF" if broken else "complete"), {f.path: f.sha256 for f in manifest.files}


def strangers(home: Path) -> list[str]:
    """Return the files in the models' folder that no manifest names."""
    known = {
        str(Path(name.name) / name.tag / path)
        for name in (NAME, COPY)
        for path in (*state(home, name)[1], "manifest.json")
    }
    models = home / "models"
    found = (str(p.relative_to(models)) for p in models.rglob("*") if p.is_file())
    return sorted(path for path in found if path not in known)


def with_hub(folder: Path, base: Path, options: argparse.Namespace) -> int:
    """Serve a repository and run this script again in a process with the hub's address.

    base: the repository that GGUF files are made from.
    """
    served = Hub("org/victim", folder)
    served.beside.append(Hub("org/base", base))
    served.card = {"base_model": "org/base"}
    with serve(served) as hub:
        again = [sys.executable, __file__, "--every", str(options.every), "--served"]
        again += ["--full"] * options.full + ["--gguf"] * options.gguf
        environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0"}
        return subprocess.run(again, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", choices=("pull", "cp", "rm"), default="pull")
    parser.add_argument("--hub", action="store_true", help="pull from the stand-in for the hub")
    parser.add_argument("--every", type=int, default=1, help="only every N-th, before the last few")
    parser.add_argument("--full", action="store_true", help="the disk is full there, instead")
    parser.add_argument("--gguf", action="store_true", help="pull a GGUF file in two parts")
    parser.add_argument("--served", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moeinf-kill-") as folder:
        place = Path(folder)
        byte_tokenizer().save(str(place / "tokenizer.json"))  # all pulls here have this one
        try_once(place / "tokenizer.json")
        repack_module.try_tokenizer = try_once
        base_repository._tried = tried_once
        if options.served:
            action = pull_gguf("org/victim") if options.gguf else pull_from_hub
            return try_all(place, options, "pull from the hub", action)
        # Three files; most experts straddle two of them.
        make_checkpoint(place / "checkpoint", config(2, 3, 64, 48, 2), file_bytes=60_000)
        files = place / ("files" if options.gguf else "checkpoint")
        pull = pull_from(place / "checkpoint")
        if options.gguf:
            files.mkdir()
            path = write_gguf(place / "checkpoint", files / "x-BF16.gguf", _BF16, split=14)
            pull = pull_gguf(str(path))
        if options.hub:
            return with_hub(files, place / "checkpoint", options)
        if options.what == "pull":
            return try_all(place, options, "pull from a folder", pull)
        act(place / "before", pull, None)
        used = Settings(place / "before").state_of(NAME)
        used.mkdir(parents=True)
        (used / "eamc").write_bytes(b"what it has learned")
        return try_all(
            place, options, options.what, lambda _: {"cp": copy, "rm": remove}[options.what]
        )


def pull_from(checkpoint: Path) -> Prepare:
    """Return an action that pulls from a folder."""
    return lambda _: _pulling(LocalSource.watched(open_checkpoint(checkpoint), str(checkpoint)))


def pull_from_hub(settings: Settings) -> Action:
    """Return an action that pulls from the stand-in for the hub."""
    downloads = downloads_of(Library(settings).folder(NAME))
    return _pulling(HubSource(look_up("org/victim", None, None), downloads, None, 2))


def pull_gguf(model: str) -> Prepare:
    """Return an action that pulls a GGUF file, by its path or from the stand-in for the hub."""
    return lambda settings: _pulling(find_source(model, str(NAME), settings, ignore)[1])


def _pulling(source: Source) -> Action:
    return lambda settings: repack(source, Library(settings), NAME, ignore, ignore)


def copy(settings: Settings) -> None:
    """Run `moeinf cp`; an existing copy is fine."""
    with suppress(ModelExists):
        copy_model(settings, str(NAME), str(COPY))


def remove(settings: Settings) -> None:
    """Run `moeinf rm` and `moeinf prune`; an absent model is fine."""
    library = Library(settings)
    with suppress(NoSuchModel):
        library.remove(str(NAME))
    for partial in library.partials():
        library.discard(partial.name)


LAST = 8  # points that are always tried one by one, regardless of --every


def try_all(place: Path, options: argparse.Namespace, what: str, action: Prepare) -> int:
    """Kill at every point, print the outcomes, and return the exit code."""
    full, every, before = options.full, options.every, place / "before"
    changed, wrong = COPY if what == "cp" else NAME, []

    def begin(home: Path) -> Path:
        shutil.rmtree(home, ignore_errors=True)
        if before.exists():
            shutil.copytree(before, home)
        return home

    status, points = act(begin(place / "whole"), action, None)
    kind, shas = aim = state(place / "whole", changed)
    assert (status, kind) == (0, "absent" if what == "rm" else "complete"), (status, kind)
    shas = shas or state(before)[1]
    outcomes: Counter[str] = Counter()
    near = max(1, points - LAST)  # near the change from absent to complete, or the reverse
    for at in itertools.chain(range(1, near, every), itertools.count(near)):
        home = begin(place / "home")
        status, _ = act(home, action, at, full)
        kind, found = state(home, changed)
        met = (FULL << 8) if full else signal.SIGKILL
        both = full or {"absent", "complete"} <= outcomes.keys()
        if at > points + (0 if both else LAST) and status != met:
            break  # beyond the end; the number of points also depends on timing
        outcomes[kind if status == met else f"unharmed {kind}"] += 1
        if kind == "HALF" or (found and found != shas):
            wrong.append(f"point {at}: {kind} after the kill")
        if what == "cp" and state(home) != ("complete", shas):
            wrong.append(f"point {at}: the origin is {state(home)[0]}")
        if what == "cp" and kind == "complete" and not learned(home, COPY):
            wrong.append(f"point {at}: the copy lacks what its origin has learned")
        finished = finished_files(home) if what.startswith("pull") else {}
        status, _ = act(home, action, None)
        kind, found = state(home, changed)
        left = strangers(home)
        folder = Library(Settings(home)).folder(NAME)
        if again := [name for name, before in finished.items() if written(folder / name) != before]:
            wrong.append(f"point {at}: written again: {again}")
        outcomes["kept files"] += len(finished)
        if status != 0 or (kind, found) != aim or left:
            other = sorted(set(found.items()) ^ set(aim[1].items()))
            wrong.append(f"point {at}: rerun ended with {status}, {kind}, left {left}, {other}")
        if what == "rm" and learned(home, NAME):
            wrong.append(f"point {at}: what was learned outlives the model")
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    how = "disk full" if full else "killed"
    print(f"{what}: {points} points, {how} at every {every}: {told}")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


def written(path: Path) -> tuple[int, int]:
    """Return the inode of a file and the time of its last write."""
    about = path.stat()
    return about.st_ino, about.st_mtime_ns


def finished_files(home: Path) -> dict[str, tuple[int, int]]:
    """Return, with `written`, the files of weights that the journal of a pull calls finished."""
    partial = partial_folder(Library(Settings(home)).folder(NAME))
    lines = read_lines(partial / JOURNAL)
    names = [line.file.path for line in lines if line.file is not None]
    return {name: written(partial / name) for name in names if name.endswith(".safetensors")}


def learned(home: Path, name: ModelName) -> bool:
    """Return True when the state of a model exists."""
    return (Settings(home).state_of(name) / "eamc").exists()


if __name__ == "__main__":
    sys.exit(main())
